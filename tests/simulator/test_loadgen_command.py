"""The bench command as a person types it, against a fake endpoint; and the choice of its workload."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Mapping
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvrouting_core.routing.events import Outcome
from kvrouting_simulator.loadgen.command import bench
from kvrouting_simulator.loadgen.drive import lateness_notes
from kvrouting_simulator.loadgen.workload_choice import Traffic, build_client, build_spec, described
from kvrouting_simulator.report import Report, load_report, save_report, summarise
from kvrouting_simulator.workloads.arrivals import PoissonArrivals
from kvrouting_simulator.workloads.gsp import Gsp
from kvrouting_simulator.workloads.multi_turn import MultiTurn
from kvrouting_simulator.workloads.traces import AgentSessions, AzureTrace, MooncakeTrace
from tests.fakes.endpoint import Script, generate_events, serving
from tests.fakes.request_records import random_records, record, run
from tests.processes import command

FLOATS = ("--rate", "--speed", "--duration", "--timeout", "--goodput-ttft")
SMALL = ("--set", "groups=2", "--set", "prompts_per_group=3", "--set", "lengths_tokens=8,16")


def answer(path: str, body: Mapping[str, object]) -> Script:
    if path == "/flush_cache":
        return Script(body="flushed")
    prompt = body["input_ids"]
    assert isinstance(prompt, list)
    decision = json.dumps({"worker": f"engine-{prompt[-1] % 2}/0"})
    return Script(
        events=generate_events(tokens=4, prompt_tokens=len(prompt), cached_tokens=len(prompt) // 2),
        headers={"x-kvrouting-decision": decision},
    )


async def bench_process(*arguments: str) -> asyncio.subprocess.Process:
    return await command("bench", *arguments)


@pytest.mark.processes
async def test_a_run_is_reported_and_saved(tmp_path: Path) -> None:
    async with serving(answer) as endpoint:
        process = await bench_process(
            "--url", endpoint.url, *SMALL, "--rate", "500", "--flush", endpoint.url, "--goodput-ttft", "60000",
            "--out", str(tmp_path / "a.json"), "--html", str(tmp_path / "a.html"), "--name", "mine",
        )  # fmt: skip
        output = (await process.communicate())[0].decode()
    assert process.returncode == 0, output
    assert [path for path, _ in endpoint.seen] == ["/flush_cache"] + ["/generate"] * 6
    (saved,) = load_report(tmp_path / "a.json").runs
    assert saved.name == "mine"
    assert saved.summary.completed == 6
    assert saved.summary.hit_rate == pytest.approx(0.5)
    assert {w.worker for w in saved.summary.workers} <= {"engine-0/0", "engine-1/0"}
    assert saved.summary.goodput_per_s == pytest.approx(saved.summary.throughput_per_s)
    assert saved.parameters["groups"] == 2
    assert "gsp: 6 of 6 requests ended, hit rate 50.0 %, 0 failed" in output
    assert "hit rate" in output
    assert (tmp_path / "a.html").read_text().startswith("<!doctype html>")


@pytest.mark.processes
async def test_an_interrupt_reports_what_was_done(tmp_path: Path) -> None:
    def answer_two(path: str, body: Mapping[str, object]) -> Script:
        script = answer(path, body)
        script.silent = len(endpoint.seen) > 2
        return script

    async with serving(answer_two) as endpoint:
        # So slow that the first two answers are in long before the last request is sent.
        process = await bench_process("--url", endpoint.url, *SMALL, "--rate", "4", "--out", str(tmp_path / "a.json"))
        while len(endpoint.seen) < 6:
            await asyncio.sleep(0.02)
        process.send_signal(signal.SIGINT)
        output = (await process.communicate())[0].decode()
    assert process.returncode == 0, output
    (saved,) = load_report(tmp_path / "a.json").runs
    outcomes = [r.outcome for r in saved.records]
    assert (outcomes.count(Outcome.COMPLETED), outcomes.count(Outcome.CANCELLED)) == (2, 4)
    assert "4 × interrupted" in output


@pytest.mark.processes
async def test_a_dead_endpoint_is_a_report_of_failures(unused_tcp_port: int) -> None:
    process = await bench_process("--url", f"http://127.0.0.1:{unused_tcp_port}", *SMALL, "--rate", "500")
    output = (await process.communicate())[0].decode()
    assert process.returncode == 1
    assert "6 × connection_refused: " in output
    assert "no request was answered" in output


@pytest.mark.processes
async def test_one_answer_among_failures_is_a_run(tmp_path: Path) -> None:
    def answer_one(path: str, body: Mapping[str, object]) -> Script:
        return answer(path, body) if len(endpoint.seen) == 1 else Script(status=503, body="no worker is ready")

    async with serving(answer_one) as endpoint:
        process = await bench_process("--url", endpoint.url, *SMALL, "--rate", "500")
        output = (await process.communicate())[0].decode()
    assert process.returncode == 0, output
    assert "5 × http_503: no worker is ready" in output


def test_compare_prints_saved_runs_side_by_side(tmp_path: Path) -> None:
    for name, seed in (("one", 1), ("two", 2)):
        save_report(Report(title="t", runs=(run("same name", random_records(seed)),)), tmp_path / f"{name}.json")
    html = tmp_path / "both.html"
    result = CliRunner(env={"COLUMNS": "120"}).invoke(
        bench, ["compare", str(tmp_path / "one.json"), str(tmp_path / "two.json"), "--html", str(html)]
    )
    assert result.exit_code == 0, result.output
    assert "two: same name" in result.output
    assert "times better than same name" in result.output
    assert "two: same name" in html.read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give --url"),
        (["--url", "localhost:80"], "must begin with http://"),
        (["--url", "http://x", "--set", "groups"], "is not NAME=VALUE"),
        (["--url", "http://x", "--set", "groups=many"], "gsp.groups is 'many'"),
        (["--url", "http://x", "--set", "groupings=3"], "no 'groupings'"),
        (["--url", "http://x", "--header", "nothing"], "is not 'NAME: VALUE'"),
        (["--url", "http://x", "--api", "chat"], "--tokenizer"),
        (["--url", "http://x", "--workload", "unheard"], "'unheard'"),
        (["--url", "http://x", "--speed", "2"], "no 'speed'"),
        (["--url", "http://x", "--rate", "0"], "--rate"),
        *((["--url", "http://x", option, "inf"], "inf is not a finite number") for option in FLOATS),
        *((["--url", "http://x", option, "nan"], "nan is not a finite number") for option in FLOATS),
        (["--url", "http://x", "--set", "prefix_ratio=nan"], "prefix_ratio must be in [0, 1), got nan"),
        (["--url", "http://x", "--rate", "1e-320"], "got inf"),
    ],
)
def test_wrong_input_is_named(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(bench, arguments)
    assert result.exit_code != 0
    assert message in result.output
    assert "Traceback" not in result.output


def test_a_bad_line_of_a_trace_is_named(tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    trace.write_text("{}\n")
    result = CliRunner().invoke(bench, ["--url", "http://x", "--trace", str(trace)])
    assert f"{trace}:1" in result.output.replace("\n", "")


def test_settings_become_numbers_of_the_workload() -> None:
    spec = build_spec(
        Traffic(settings={"groups": "5", "lengths_tokens": "32,64", "prefix_ratio": "0.25"}, rate_per_s=3, requests=7)
    )
    assert spec == Gsp(
        groups=5,
        lengths_tokens=(32, 64),
        prefix_ratio=0.25,
        requests=7,
        arrivals=PoissonArrivals(rate_per_s=3),
    )
    assert described(spec, seed=4)["lengths_tokens"] == "32, 64"
    assert described(spec, seed=4)["rate (requests/s)"] == 3
    assert build_client(spec, seed=1)[1] == 7


def test_the_closed_loop_has_no_number_of_requests_beforehand() -> None:
    spec = build_spec(Traffic(workload="multi_turn", settings={"loop": "paper", "conversations": "4"}))
    assert isinstance(spec, MultiTurn)
    assert build_client(spec, seed=1)[1] is None


def test_the_kind_of_a_trace_is_read_from_its_first_line(tmp_path: Path) -> None:
    mooncake = {"timestamp": 0, "input_length": 4, "output_length": 2, "hash_ids": [1]}
    agent = {**mooncake, "suite": "a", "session": "s", "turn": 0, "timestamp_ms": 0}
    files = {
        "m.jsonl": (json.dumps(mooncake), MooncakeTrace),
        "a.jsonl": (json.dumps(agent), AgentSessions),
        "z.csv": ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,4,2", AzureTrace),
    }
    for name, (text, kind) in files.items():
        (tmp_path / name).write_text(text + "\n")
        traffic = Traffic(trace=tmp_path / name, speed=2.0)
        spec = build_spec(traffic)
        assert isinstance(spec, kind)
        assert build_client(spec, seed=1)[1] == 1
    with pytest.raises(ValueError, match="rate has no meaning"):
        build_spec(Traffic(trace=tmp_path / "m.jsonl", rate_per_s=3))
    paced = build_spec(Traffic(trace=tmp_path / "a.jsonl", rate_per_s=3))
    assert isinstance(paced, AgentSessions)
    assert paced.arrivals == PoissonArrivals(rate_per_s=3)


def test_a_generator_that_sends_late_says_so() -> None:
    punctual = summarise([record(sent_ms=1.0)])
    late = summarise([record(sent_ms=300.0)])
    assert lateness_notes(punctual, max_connections=None) == ()
    (note,) = lateness_notes(late, max_connections=None)
    assert "P99 300 ms" in note
    assert "could not keep up" in note
    assert "limit of 8 connections" in lateness_notes(late, max_connections=8)[0]
