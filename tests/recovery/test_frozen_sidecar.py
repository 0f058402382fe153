"""A sidecar that stands still must not be felt by its engine: publishing is what would hold its steps up."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvrouting_simulator.demo.pool_plan import PoolPlan
from tests.processes import LocalPool
from tests.recovery.pool_under_test import Load, views_equal_engines

pytestmark = pytest.mark.processes

FROZEN_S = 60.0


async def step_page(pool: LocalPool) -> Mapping[str, Any]:
    page = await pool.get_json(f"{pool.engine_urls[0]}/steps")
    rank: Mapping[str, Any] = page["ranks"][0]
    return rank


def publish_ms(page: Mapping[str, Any], *, since_ms: float) -> Sequence[float]:
    return [step["publish_ms"] for step in page["recent"] if step["start_ms"] >= since_ms]


@pytest.mark.slow
async def test_an_engine_does_not_feel_a_frozen_sidecar(tmp_path: Path) -> None:
    """Queue and high-water mark are small, so that both are full many times over while the sidecar is frozen."""
    plan = PoolPlan(
        engines=1,
        capacity_tokens=9000,
        speed=20,
        engine_options=("--kv-events-queue", "100", "--kv-events-hwm", "100", "--kv-events-buffer", "100"),
        # The frozen worker must stay chosen: the load has to go on.
        router_options=("--silence-s", "600", "--gone-s", "1200"),
    )
    async with LocalPool(plan, folder=tmp_path) as pool:
        load = Load(pool, seed=2)
        ending = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(load.run(until=ending, clients=4))
            await asyncio.sleep(5)
            before = await step_page(pool)
            calm = publish_ms(before, since_ms=0)
            pool.sidecars[0].freeze()
            await asyncio.sleep(FROZEN_S)
            after = await step_page(pool)
            pool.sidecars[0].resume()
            ending.set()
        disturbed = publish_ms(after, since_ms=after["recent"][-1]["start_ms"] - 1e5)
        batches = after["steps"] - before["steps"]
        assert batches > 1000, f"only {batches} steps: the load never filled the buffers"
        assert after["blocked_event_batches"] == 0
        assert after["lost_ms"] == before["lost_ms"]
        # Medians of hundreds of steps: a queue that blocks would show as milliseconds, a busy machine does not.
        assert statistics.median(disturbed) < statistics.median(calm) + 1.0
        await views_equal_engines(pool)
        await load.credited_rightly()
