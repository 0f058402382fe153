"""Tokens matched by the router against tokens found by the engine while caches are under pressure.

Where they differ by a block or more, the engine's event log must hold the cause.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvrouting_simulator.demo.pool_plan import PoolPlan, worker_id
from tests.processes import LocalPool
from tests.recovery.attribution import cause
from tests.recovery.event_log import EventLog, settle
from tests.recovery.pool_under_test import BLOCK_TOKENS, Load

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("page_size", [1, 16])
async def test_every_difference_has_its_cause_in_the_event_log(tmp_path: Path, page_size: int) -> None:
    plan = PoolPlan(engines=2, capacity_tokens=9000, page_size=page_size, speed=10)
    async with LocalPool(plan, folder=tmp_path) as pool:
        logs = {worker_id(n): EventLog(ports.kv_events) for n, ports in enumerate(pool.engine_ports)}
        recording = [asyncio.create_task(log.record()) for log in logs.values()]
        await settle()
        load = Load(pool, seed=page_size, groups=40)
        await load.run(requests=400, clients=8)
        await settle()
        for task in recording:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
    assert all(log.is_complete() for log in logs.values())
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
