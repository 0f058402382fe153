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
from tests.recovery.event_log import EventLog, settle
from tests.recovery.pool_under_test import BLOCK_TOKENS, Answer, Load

pytestmark = pytest.mark.processes

# Deltas, the request's way to the engine and the wait for its admission: a decision may rest on a view this old.
VIEW_AGE_S = 2.0


def cause(answer: Answer, log: EventLog) -> str:
    """Why the engine found another prefix than the router saw: `none`, a cause, or `unexplained`.

    The router must have seen what the engine held at one moment shortly before or during the request, and the engine
    must have found what it held at a later one. Their order tells whether pages went or came meanwhile.
    """
    limit = len(answer.prompt) - 1
    if answer.matched_tokens <= answer.cached_tokens < answer.matched_tokens + BLOCK_TOKENS:
        return "none"
    moments = [(s, min(held, limit)) for s, held in log.cached_prefix(answer.prompt)]
    before = [held for s, held in moments if s < answer.sent_unix_s - VIEW_AGE_S][-1:] or [0]
    window = before + [held for s, held in moments if answer.sent_unix_s - VIEW_AGE_S <= s <= answer.ended_unix_s]
    seen = [i for i, held in enumerate(window) if held // BLOCK_TOKENS * BLOCK_TOKENS == answer.matched_tokens]
    found = [i for i, held in enumerate(window) if held == answer.cached_tokens]
    if not seen or not found or seen[0] > found[-1]:
        return "unexplained"
    return "evicted meanwhile" if answer.cached_tokens < answer.matched_tokens else "stored meanwhile"


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
