"""The demo as a person runs it: its report, and that nothing stays behind however it ends."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

from kvrouting_simulator.demo.command import demo
from kvrouting_simulator.demo.scenario import HALF_CAPACITY_TOKENS, HALF_GSP, DemoScenario, Fault
from kvrouting_simulator.demo.virtual_run import middle, simulated, virtual_scenario
from kvrouting_simulator.report import PoolMark, Report, load_report
from tests.fakes.request_records import random_records, record, run
from tests.processes import command


async def demo_process(out: Path, *arguments: str) -> asyncio.subprocess.Process:
    return await command("demo", "--out", str(out), *arguments)


async def requests_are_served(out: Path) -> None:
    router_log = out / "logs" / "cache_aware-lru" / "router-0.log"
    while not router_log.exists() or router_log.read_text().count('"to":"live"') < 4:
        await asyncio.sleep(0.1)
    await asyncio.sleep(1.0)


@pytest.mark.processes
@pytest.mark.slow
async def test_the_demo_compares_two_set_ups_and_says_what_to_open(tmp_path: Path) -> None:
    process = await demo_process(tmp_path, "--requests", "36")
    output = (await process.communicate())[0].decode()
    assert process.returncode == 0, output
    assert f"open {tmp_path / 'report.html'}" in output.replace("\n", "")
    assert "cache_aware + lru: 36 of 36 requests ended" in output
    assert "Agreement" in output
    report = load_report(tmp_path / "report.json")
    assert [r.name for r in report.runs[:2]] == ["cache_aware + lru", "lbgr + rlt-adaptive"]
    assert [r.name for r in report.compared[2:]] == ["cache_aware 0.4 + lru (virtual)"]
    assert len(report.pairs) == 2
    assert all(r.summary.completed == 36 for r in report.runs)
    first, second = report.runs[:2]
    assert [r.arrival_ms for r in first.records] == [r.arrival_ms for r in second.records]
    assert (tmp_path / "report.html").stat().st_size > 100_000


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["interrupt", "terminate"])
async def test_nothing_is_left_when_the_demo_is_ended(tmp_path: Path, number: signal.Signals) -> None:
    process = await demo_process(tmp_path)
    async with asyncio.timeout(120):
        await requests_are_served(tmp_path)
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) == 9
    process.send_signal(number)
    output = (await process.communicate())[0].decode()
    assert process.returncode == 130
    assert "all processes have ended" in output
    assert "Traceback" not in output
    assert not [child for child in children if child.is_running()]


@pytest.mark.processes
async def test_a_process_that_dies_is_shown_and_nothing_is_left(tmp_path: Path) -> None:
    process = await demo_process(tmp_path)
    async with asyncio.timeout(120):
        await requests_are_served(tmp_path)
    children = psutil.Process(process.pid).children(recursive=True)
    router = next(child for child in children if "kvrouting_router" in " ".join(child.cmdline()))
    router.kill()
    output = (await process.communicate())[0].decode()
    assert process.returncode == 1
    assert "router-0 ended on its own with exit code -9" in output
    assert "-m kvrouting_router" in output
    assert '"event":"listening"' in output
    assert not [child for child in children if child.is_running()]


def test_half_of_everything_that_matters_is_half() -> None:
    assert (HALF_GSP.groups, HALF_CAPACITY_TOKENS) == (128 // 2, 197_000 // 2)
    scenario = DemoScenario()
    for setup in scenario.setups:
        plan = scenario.plan(setup)
        assert (plan.policy, plan.eviction) == (setup.policy, setup.eviction)
        assert plan.capacity_tokens == HALF_CAPACITY_TOKENS


def test_the_virtual_run_gets_the_failure_as_it_happened() -> None:
    scenario = DemoScenario()
    setup = scenario.setups[1]
    real = run(
        setup.name,
        random_records(1),
        marks=[
            PoolMark(at_ms=5_000.0, kind="killed", worker="w2/0"),
            PoolMark(at_ms=9_000.0, kind="returned", worker="w2/0"),
        ],
    )
    virtual = simulated(virtual_scenario(scenario, setup, real=real, variant=0))
    assert virtual.name == "lbgr + rlt-adaptive (virtual)"
    assert virtual.marks == real.marks
    assert virtual.summary.requests == HALF_GSP.requests
    assert virtual.summary.imbalance_of == real.summary.imbalance_of
    assert Report(title="t", runs=(real, virtual), pairs=((real.name, virtual.name),)).compared == (real,)


def test_the_middle_simulation_stands_for_all_and_tells_their_spread() -> None:
    runs = [run("x", [record(latency_ms=latency_ms)]) for latency_ms in (900.0, 500.0, 700.0)]
    chosen = middle(runs)
    assert chosen.records == runs[2].records
    assert "the middle one of 3 simulations" in chosen.notes[-1]
    assert "latency P50 500 to 900 ms" in chosen.notes[-1]


def test_scenarios_refuse_what_cannot_be() -> None:
    with pytest.raises(ValueError, match="worker 4 is to be killed, there are only 4"):
        DemoScenario(fault=Fault(worker=4, killed_ms=1, away_ms=1))
    with pytest.raises(ValueError, match="away_ms must be positive, got 0"):
        Fault(worker=0, killed_ms=1, away_ms=0)
    scenario = DemoScenario(speed=2.0)
    with pytest.raises(ValueError, match="theirs was 2"):
        virtual_scenario(scenario, scenario.setups[0], real=run("x", random_records(1)), variant=0)


def test_help_names_the_options() -> None:
    result = CliRunner().invoke(demo, ["--help"])
    assert "--no-virtual" in result.output
    assert "out/demo" in result.output
