"""Scenario files and the command."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvrouting_core.routing.events import SchedulerOptions
from kvrouting_simulator.experiment import Delays, Failure, ScenarioError, build_scenario, read_values
from kvrouting_simulator.experiment.command import simulate
from kvrouting_simulator.report import load_report
from kvrouting_simulator.workloads import Gsp, PoissonArrivals

FLOATS = ("--rate", "--cv", "--speed", "--goodput-ttft")
TOML = """
name = "two kinds"
policy = "lbgr"
seed = 7
goodput_ttft_ms = 500
[policy_parameters]
price = 2
[workload]
kind = "gsp"
groups = 6
prompts_per_group = 4
lengths_tokens = [128, 256]
arrivals = { kind = "poisson", rate_per_s = 20 }
[[workers]]
count = 2
capacity_tokens = 3000
page_size = 16
scheduler = { mixed_chunk = true }
[[workers]]
worker_class = "H200"
eviction = "lru"
[delays]
index_ms = 10
[[failures]]
worker = 1
killed_ms = 200
back_ms = 400
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "scenario.toml"
    path.write_text(TOML)
    return path


def test_a_file_says_everything(file: Path) -> None:
    scenario = build_scenario(read_values(file))
    assert scenario.title == "two kinds"
    assert (scenario.policy, scenario.seed, scenario.policy_parameters) == ("lbgr", 7, {"price": 2})
    assert isinstance(scenario.workload, Gsp)
    assert scenario.workload.groups == 6
    assert scenario.workload.arrivals == PoissonArrivals(rate_per_s=20)
    assert [w.worker_class for w in scenario.workers] == ["L40", "L40", "H200"]
    assert [w.tokens for w in scenario.workers] == [3000, 3000, 911_000]
    assert scenario.workers[1].scheduler == SchedulerOptions(mixed_chunk=True)
    assert scenario.delays == Delays(index_ms=10)
    assert list(scenario.failures) == [Failure(worker=1, killed_ms=200, back_ms=400)]
    assert scenario.settings["workload.groups"] == 6


def test_json_says_the_same(file: Path) -> None:
    values = read_values(file)
    other = file.with_suffix(".json")
    other.write_text(json.dumps(values))
    assert build_scenario(read_values(other)) == build_scenario(values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"polices": "x"}, "scenario has no 'polices'; known: name, policy"),
        ({"workers": [{"page_size": 65}]}, "page size 65"),
        ({"workers": [{"page_size": "16"}]}, "workers: Expected `int`, got `str` - at `\\$.page_size`"),
        ({"workers": [{"gpu": "L40"}]}, "workers has no 'gpu'; known: worker_class"),
        ({"workers": [{"worker_class": "L4"}]}, "unknown worker class 'L4'"),
        ({"workers": [{"count": 0}]}, "workers.count must be a whole number of at least 1, got 0"),
        ({"workers": 4}, "workers must be a list of tables, got 4"),
        ({"workers": [{"eviction": "fifo"}]}, "eviction must be one of rlt, .* got 'fifo'"),
        ({"workload": {"kind": "gsp", "groups": -1}}, "groups must be at least 1, got -1"),
        ({"workload": 3}, "workload must be a table, got 3"),
        ({"delays": {"hop_ms": -1}}, "hop_ms must be at least 0, got -1"),
        ({"failures": [{"worker": 0, "killed_ms": 5, "back_ms": 4}]}, "back_ms 4.0 must be after killed_ms 5.0"),
        ({"delays": {"hop_ms": math.inf}}, "hop_ms must be at least 0, got inf"),
        ({"delays": {"report_interval_ms": math.nan}}, "report_interval_ms must be positive, got nan"),
        ({"workload": {"arrivals": {"rate_per_s": math.inf}}}, "rate_per_s must be positive, got inf"),
        ({"workers": [{"slow_factor": math.inf}]}, "slow_factor must be positive, got inf"),
        ({"failures": [{"worker": 0, "killed_ms": math.nan}]}, "killed_ms must be at least 0, got nan"),
        ({"failures": [{"worker": 0, "killed_ms": 1, "back_ms": math.inf}]}, "back_ms inf must be after"),
        ({"goodput_ttft_ms": math.nan}, "goodput_ttft_ms must be positive, got nan"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
    ],
)
def test_nonsense_in_a_file_is_named(values: dict[str, object], message: str) -> None:
    with pytest.raises(ScenarioError, match=message):
        build_scenario(values)


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    for name, text in (("a.toml", "x ="), ("a.json", "{"), ("a.txt", ""), ("b.json", "[]")):
        (tmp_path / name).write_text(text)
        with pytest.raises(ScenarioError, match=name):
            read_values(tmp_path / name)


OPTIONS = [
    *("--workload", "gsp", "--order", "round_robin", "--rate", "30", "--requests", "60"),
    *("--set", "groups=12", "--set", "lengths_tokens=64,256"),
    *("--policy", "cache_aware", "--policy", "lbgr", "--eviction", "rlt"),
    *("--workers", "2", "--worker-class", "L40", "--capacity-tokens", "2000", "--page-size", "16", "--seed", "3"),
]


def run(*arguments: str) -> str:
    result = CliRunner().invoke(simulate, list(arguments))
    assert result.exit_code == 0, result.output
    return result.output


def test_options_are_enough_and_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    first, second, other = (str(tmp_path / name) for name in ("1.json", "2.json", "3.json"))
    output = run(*OPTIONS, "--out", first)
    assert "cache_aware + rlt" in output
    assert "lbgr + rlt" in output
    assert "latency P95" in output
    run(*OPTIONS, "--out", second)
    assert Path(first).read_bytes() == Path(second).read_bytes()
    run(*OPTIONS, "--seed", "4", "--out", other)
    assert Path(first).read_bytes() != Path(other).read_bytes()
    report = load_report(Path(first))
    assert [r.summary.completed for r in report.runs] == [60, 60]
    assert report.runs[0].parameters["workload.order"] == "round_robin"


def test_options_change_a_file(file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    run(str(file), str(file), "--seed", "8", "--rate", "5", "--eviction", "slru", "--cv", "2", "--out", str(out))
    runs = load_report(out).runs
    assert [r.name for r in runs] == ["two kinds", "two kinds (2)"]
    assert runs[0].parameters["seed"] == 8
    assert runs[0].parameters["workload.arrivals.kind"] == "gamma"
    assert "slru" in str(runs[0].parameters["workers"])
    assert [m.kind for m in runs[0].marks] == ["killed", "returned"]


def test_a_trace_is_replayed_with_its_own_times(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [{"timestamp": 10 * i, "input_length": 600, "output_length": 2, "hash_ids": [0, i + 1]} for i in range(5)]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "out.json"
    run("--trace", str(trace), "--policy", "lbgr", "--speed", "2", "--out", str(out))
    assert sorted(r.arrival_ms for r in load_report(out).runs[0].records) == [0, 5, 10, 15, 20]
    result = CliRunner().invoke(simulate, ["--trace", str(trace), "--rate", "3"])
    assert result.exit_code == 1
    assert "workload mooncake has recorded times" in result.output


def test_a_run_without_an_answer_is_reported_and_fails(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    result = CliRunner().invoke(simulate, ["--capacity-tokens", "64", "--requests", "3", "--out", str(out)])
    assert result.exit_code == 1
    assert "no request was answered in lbgr + rlt" in result.output
    assert load_report(out).runs[0].summary.refused == 3


def test_years_without_a_request_take_no_time() -> None:
    output = run("--rate", "1e-9", "--requests", "3", "--set", "groups=1", "--policy", "lbgr")
    assert "completed requests" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--parameter", "mu=2", "--policy", "lbgr"], "no parameter 'mu'"),
        (["--set", "groups"], "'groups' is not NAME=VALUE"),
        (["--order", "sorted"], "gsp.order is 'sorted'"),
        *(([option, "inf"], "inf is not a finite number") for option in FLOATS),
        *(([option, "nan"], "nan is not a finite number") for option in FLOATS),
        (["--workload", "mooncake"], "workload 'mooncake' needs a trace: give its file with --trace"),
    ],
)
def test_nonsense_on_the_command_line_is_named(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(simulate, arguments)
    assert result.exit_code != 0
    assert message in result.output
