"""Requests sent one group after the other, so that a busy machine changes times but not who meets whom."""

from __future__ import annotations

import asyncio
import itertools

from kvrouting_simulator.workloads import CalibrationLoad
from tests.processes import LocalPool


async def send_groups(pool: LocalPool, load: CalibrationLoad, *, seed: int) -> int:
    """Sends what arrives at one moment together, and the next when all of it is answered. Returns: how many."""
    items = load.workload(seed=seed).items
    for _, group in itertools.groupby(items, key=lambda item: item.arrival_ms):
        answers = await asyncio.gather(
            *(pool.generate(item.tokens, output_tokens=item.output_tokens, timeout_s=300) for item in group)
        )
        assert all(answer.status == 200 and answer.ended_properly for answer in answers)
    return len(items)
