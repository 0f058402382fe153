"""The thinnest whole path on real processes: client, router, engine, KV events, sidecar, router."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from kvrouting_simulator.demo.cluster import Cluster, PoolNotLiveError
from kvrouting_simulator.demo.pool_plan import PoolPlan, worker_id
from kvrouting_simulator.demo.processes import ProcessFailedError
from kvrouting_simulator.demo.real_run import run_setup
from kvrouting_simulator.demo.scenario import DemoScenario, Fault, Setup
from kvrouting_simulator.workloads.arrivals import PoissonArrivals
from kvrouting_simulator.workloads.gsp import Gsp
from tests.processes import LocalPool, eventually

pytestmark = pytest.mark.processes

PROMPT = list(range(1, 1001))


def nothing_runs(pool: Cluster) -> bool:
    started = [process for process in pool.processes if process.exit_code is not None or process.is_running]
    return not any(process.is_running or psutil.pid_exists(process.pid) for process in started)


async def test_a_prefix_that_was_served_is_found_again_and_named(tmp_path: Path) -> None:
    async with LocalPool(PoolPlan(engines=2, speed=20), folder=tmp_path) as pool:
        first = await pool.generate([*PROMPT, 5])
        assert first.status == 200
        assert first.ended_properly
        assert first.meta["cached_tokens"] == 0
        assert first.chosen["matched_tokens"] == 0
        served = int(first.chosen["worker"][1])
        view = await pool.settled(served)
        assert view["blocks"] == (len(PROMPT) + 1 + 3) // 64  # the last answer token is never cached

        second = await pool.generate([*PROMPT, 6])
        assert second.chosen["worker"] == first.chosen["worker"]
        assert second.chosen["matched_tokens"] == len(PROMPT) // 64 * 64
        assert second.meta["cached_tokens"] == len(PROMPT)
        other = next(c for c in (second.decision or {})["candidates"] if c["worker"] != second.chosen["worker"])
        assert other["matched_tokens"] == 0
    assert nothing_runs(pool)


async def test_a_worker_that_is_killed_and_returns_starts_from_nothing(tmp_path: Path) -> None:
    async with LocalPool(PoolPlan(engines=2, speed=20), folder=tmp_path) as pool:
        served = int((await pool.generate(PROMPT)).chosen["worker"][1])
        old = await pool.settled(served)
        await pool.kill_engine(served)
        while_away = await pool.generate([*PROMPT, 7])
        assert while_away.status == 200
        assert while_away.chosen["worker"] == worker_id(1 - served)
        await pool.restart_engine(served)
        await pool.wait_live([served], timeout_s=30)

        async def known_as_new() -> bool:
            view, state = await pool.worker(served), await pool.engine_state(served)
            return bool(view["epoch"] == state["epoch"])

        await eventually(known_as_new)
        new = await pool.worker(served)
        assert new["epoch"] != old["epoch"]
        assert new["blocks"] == 0
        direct = await pool.generate(PROMPT, url=pool.engine_urls[served])
        assert direct.meta["cached_tokens"] == 0


async def test_a_frozen_engine_loses_its_requests_to_the_others_and_comes_back(tmp_path: Path) -> None:
    plan = PoolPlan(engines=2, speed=20, router_options=["--first-byte-s", "1"])
    async with LocalPool(plan, folder=tmp_path) as pool:
        served = int((await pool.generate(PROMPT)).chosen["worker"][1])
        await pool.settled(served)
        pool.engines[served].freeze()
        answer = await pool.generate([*PROMPT, 8])
        assert answer.status == 200
        assert answer.chosen["worker"] == worker_id(1 - served)
        pool.engines[served].resume()
        await pool.wait_live([served], timeout_s=30)


async def test_the_demos_half_answers_everything_although_a_worker_dies(tmp_path: Path) -> None:
    scenario = DemoScenario(
        engines=2,
        capacity_tokens=20_000,
        speed=20,
        gsp=Gsp(
            groups=8,
            prompts_per_group=8,
            lengths_tokens=(512, 1024, 2048),
            output_tokens=16,
            arrivals=PoissonArrivals(rate_per_s=20),
            requests=60,
        ),
        fault=Fault(worker=1, killed_ms=700, away_ms=100),
    )
    setup = Setup(policy="lbgr", eviction="rlt")
    console = Console(quiet=True)
    run = await run_setup(scenario, setup, folder=tmp_path, console=console)
    assert run.summary.requests == 60
    assert run.summary.completed == 60
    assert run.summary.lost == 0
    assert run.summary.hit_rate is not None
    assert run.summary.hit_rate > 0
    assert run.marks[0].kind == "killed"
    assert run.marks[0].worker == "w1/0"
    assert {load.worker for load in run.summary.workers} == {"w0/0", "w1/0"}
    assert all(record.output_tokens == 16 for record in run.records)
    logged = {path.name for path in tmp_path.iterdir()}
    assert logged == {"engine-0.log", "engine-1.log", "sidecar-0.log", "sidecar-1.log", "router-0.log"}
    assert (tmp_path / "engine-1.log").read_text().count('"listening"') >= 1


async def test_a_pool_whose_process_cannot_start_shows_why_and_leaves_nothing(tmp_path: Path) -> None:
    pool = LocalPool(PoolPlan(engines=1, engine_options=["--no-such-option"]), folder=tmp_path)
    with pytest.raises(ProcessFailedError, match=r"(?s)ended with exit code 2.*--no-such-option.*No such option"):
        await pool.__aenter__()
    assert nothing_runs(pool)


async def test_a_process_that_dies_is_noticed(tmp_path: Path) -> None:
    async with LocalPool(PoolPlan(engines=1, speed=20), folder=tmp_path) as pool:
        watching = asyncio.create_task(pool.watch())
        psutil.Process(pool.sidecars[0].pid).send_signal(signal.SIGKILL)
        with pytest.raises(ProcessFailedError, match="sidecar-0 ended on its own with exit code -9"):
            await asyncio.wait_for(watching, 30)
        with pytest.raises(ProcessFailedError):
            await pool.wait_live([0], timeout_s=30)


async def test_a_worker_that_does_not_join_is_reported_with_the_routers_view(tmp_path: Path) -> None:
    async with LocalPool(PoolPlan(engines=1, speed=20), folder=tmp_path) as pool:
        with pytest.raises(PoolNotLiveError, match=r"does not see w7/0 live \(w0/0 is live"):
            await pool.wait_live([7], timeout_s=0.5)


async def test_secrets_are_nowhere_to_be_seen(tmp_path: Path) -> None:
    async with LocalPool(PoolPlan(engines=1, speed=20), folder=tmp_path) as pool:
        folder = Path(pool.routers[0].spec.command[pool.routers[0].spec.command.index("--hash-key-file") + 1]).parent
        secrets = [path.read_text() for path in folder.iterdir()]
        assert len(secrets) == 2
        assert all(path.stat().st_mode & 0o077 == 0 for path in folder.iterdir())
        seen = [json.dumps(psutil.Process(process.pid).cmdline()) for process in pool.processes]
        seen += [path.read_text() for path in tmp_path.iterdir()]
        assert not any(secret in text for secret in secrets for text in seen)
    assert not folder.exists()
