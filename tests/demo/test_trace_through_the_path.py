"""A published trace through the whole path: the load generator as a command, the router, four engines with sidecars."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvrouting_simulator.demo.pool_plan import PoolPlan, worker_id
from kvrouting_simulator.report import load_report
from tests.processes import LocalPool, command
from tests.shared_data import shared_data

pytestmark = pytest.mark.processes

TRACE = "mooncake_conversation_trace.jsonl.xz"
REQUESTS = 40


async def test_the_first_conversations_of_a_trace_are_answered_and_share_prefixes(tmp_path: Path) -> None:
    trace = shared_data(TRACE)
    out = tmp_path / "report.json"
    async with LocalPool(PoolPlan(engines=4, worker_class="H200", speed=20), folder=tmp_path) as pool:
        bench = await command(
            "bench", "--url", pool.router_url, "--trace", str(trace), "--requests", str(REQUESTS), "--speed", "4",
            "--out", str(out),
        )  # fmt: skip
        output = (await bench.communicate())[0].decode()
    assert bench.returncode == 0, output
    assert f"{TRACE}: {REQUESTS} of {REQUESTS} requests ended" in output
    (run,) = load_report(out).runs
    assert (run.summary.requests, run.summary.completed, run.summary.lost) == (REQUESTS, REQUESTS, 0)
    assert run.parameters["workload"] == "MooncakeTrace"
    assert run.summary.hit_rate is not None
    assert run.summary.hit_rate > 0
    assert {load.worker for load in run.summary.workers} <= {worker_id(number) for number in range(4)}
    assert max(record.prompt_tokens for record in run.records) > 10_000
