"""Tokens matched by the router against tokens found by the engine while caches are under pressure.

Where they differ by a block or more, the engine's event log must hold the cause.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

import pytest

from kvrouting_simulator.demo.pool_plan import PoolPlan, worker_id
from tests.processes import LocalPool, eventually
from tests.recovery.attribution import cause
from tests.recovery.event_log import EventLog
from tests.recovery.pool_under_test import BLOCK_TOKENS, Load, flush

pytestmark = pytest.mark.processes


@contextlib.asynccontextmanager
async def recorded(pool: LocalPool) -> AsyncIterator[dict[str, EventLog]]:
    """Logs of the engines, each from an empty cache on."""
    logs = {worker_id(n): EventLog(ports.kv_events) for n, ports in enumerate(pool.engine_ports)}
    recording = [asyncio.create_task(log.record()) for log in logs.values()]

    async def all_begin_empty() -> bool:
        """Until its subscription stands, a log hears nothing: so something is cached and flushed again."""
        for number, url in enumerate(pool.engine_urls):
            await pool.generate([number + 1] * 32, url=url)
            await flush(pool, number)
        begun = [log.forget_before_flush() for log in logs.values()]
        return all(begun)

    try:
        await eventually(all_begin_empty)
        yield logs
    finally:
        for task in recording:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


async def until_recorded(pool: LocalPool, logs: Mapping[str, EventLog]) -> None:
    """Waits until the logs hold all that the engines have published."""

    async def complete() -> bool:
        published = {worker_id(n): (await pool.engine_state(n))["sequence"] for n in range(pool.plan.engines)}
        return all(log.batches[-1].sequence + 1 == published[name] for name, log in logs.items())

    await eventually(complete)


@pytest.mark.parametrize("page_size", [1, 16])
async def test_every_difference_has_its_cause_in_the_event_log(tmp_path: Path, page_size: int) -> None:
    plan = PoolPlan(engines=2, capacity_tokens=9000, page_size=page_size, speed=10)
    async with LocalPool(plan, folder=tmp_path) as pool:
        load = Load(pool, seed=page_size, groups=40)
        async with recorded(pool) as logs:
            await load.run(requests=400, clients=8)
            await until_recorded(pool, logs)
    assert all(log.is_contiguous() for log in logs.values())
    causes = Counter(cause(answer, logs[answer.worker]) for answer in load.answers)
    assert causes["unexplained"] == 0, causes
    assert causes["none"] > len(load.answers) / 2, causes
    assert_eviction_happened(list(logs.values()))
    last = load.answers[-1]
    forged = dataclasses.replace(last, matched_tokens=len(last.prompt) // BLOCK_TOKENS * BLOCK_TOKENS)
    assert cause(forged, logs[last.worker]) == "unexplained", "an invented credit must not find a cause"


def assert_eviction_happened(logs: Sequence[EventLog]) -> None:
    """Without pressure the test would show nothing."""
    for log in logs:
        removed = sum(len(e["block_hashes"]) for b in log.batches for e in b.events if e["type"] == "BlockRemoved")
        assert removed > 0
