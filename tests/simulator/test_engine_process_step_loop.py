"""The step loop on a clock that wakes it early and late."""

from __future__ import annotations

import asyncio
import itertools
import random
from array import array
from collections.abc import Sequence

import pytest

from kvrouting_core.eviction import make_policy
from kvrouting_core.radix_cache import RadixCache
from kvrouting_core.routing.events import SchedulerOptions
from kvrouting_core.service_time import worker_class
from kvrouting_simulator.engine_model import EngineModel, EngineRequest, TokenProduced
from kvrouting_simulator.engine_process.step_loop import StepLog, StepLoop


class UnpunctualClock:
    """Time jumps to a deadline, and by a random error of up to `error_ms` past or short of it."""

    speed = 1.0

    def __init__(self, *, error_ms: float, seed: int) -> None:
        self.time_ms = 0.0
        self._error_ms = error_ms
        self._rng = random.Random(seed)

    def now_ms(self) -> float:
        return self.time_ms

    async def sleep_until(self, deadline_ms: float) -> None:
        self.time_ms = max(self.time_ms, deadline_ms + self._rng.uniform(-self._error_ms, self._error_ms))
        await asyncio.sleep(0)


class Outlet:
    """Counts, and tells when everything has come out."""

    def __init__(self, expected: int) -> None:
        self.produced: list[TokenProduced] = []
        self.settlements = 0
        self.complete = asyncio.Event()
        self._expected = expected

    def tokens(self, produced: Sequence[TokenProduced]) -> None:
        self.produced.extend(produced)
        if len(self.produced) == self._expected:
            self.complete.set()

    def started(self) -> None:
        """Nothing to do."""

    def settled(self) -> None:
        self.settlements += 1


def engine_model() -> EngineModel:
    """A small L40."""
    cache = RadixCache(capacity_tokens=10_000, policy=make_policy("rlt", random.Random(0)))
    times = worker_class("L40").times
    return EngineModel(times=times, cache=cache, options=SchedulerOptions(), answer_token=lambda request, index: 1)


def request(number: int, output_tokens: int) -> EngineRequest:
    """One that shares nothing with others."""
    return EngineRequest(request_id=str(number), prompt=array("I", [number] * 20), output_tokens=output_tokens)


@pytest.mark.parametrize("error_ms", [0.0, 5.0, 100.0])
async def test_steps_follow_one_another_without_drift_however_the_timers_err(error_ms: float) -> None:
    late: list[float] = []
    clock, log = UnpunctualClock(error_ms=error_ms, seed=3), StepLog(late.append)
    outlet = Outlet(expected=50)
    loop, model = StepLoop(clock=clock, outlet=outlet, log=log), engine_model()
    running = asyncio.create_task(loop.run(model))
    model.submit(request(0, 20), now_ms=loop.model_ms)
    loop.wake()
    for number in range(1, 4):  # while the first is served, and after the loop went idle in between
        await asyncio.sleep(0)
        model.submit(request(number, 10), now_ms=loop.model_ms)
        loop.wake()
    await asyncio.wait_for(outlet.complete.wait(), 30)
    running.cancel()

    chain = list(log.recent)
    assert all(a.start_ms + a.duration_ms <= b.start_ms + 1e-9 for a, b in itertools.pairwise(chain))
    assert log.busy_ms == pytest.approx(sum(step.duration_ms for step in chain))
    assert model.load().total_busy_us == pytest.approx(log.busy_ms * 1000, abs=len(chain)), "nominal, not late, times"
    assert len(late) == log.steps
    assert all(0 <= seconds <= error_ms / 1000 * (1 + 1e-9) for seconds in late)
    if not error_ms:
        assert all(step.late_ms == 0 for step in chain)


async def test_time_is_lost_only_when_the_process_stood_still() -> None:
    clock, log = UnpunctualClock(error_ms=0, seed=1), StepLog(lambda seconds: None)
    outlet = Outlet(expected=30)
    loop, model = StepLoop(clock=clock, outlet=outlet, log=log), engine_model()
    model.submit(request(0, 30), now_ms=0)
    running = asyncio.create_task(loop.run(model))
    while log.steps < 10:
        await asyncio.sleep(0)
    clock.time_ms += 60_000
    await asyncio.wait_for(outlet.complete.wait(), 30)
    running.cancel()

    gaps = [b.start_ms - a.start_ms - a.duration_ms for a, b in itertools.pairwise(log.recent)]
    assert log.lost_ms == pytest.approx(60_000, rel=0.01)
    assert [gap for gap in gaps if gap > 1] == pytest.approx([log.lost_ms])


async def test_a_stalled_loop_ends_no_step_and_resumes_where_it_stood() -> None:
    clock, log = UnpunctualClock(error_ms=0, seed=1), StepLog(lambda seconds: None)
    outlet = Outlet(expected=5)
    loop, model = StepLoop(clock=clock, outlet=outlet, log=log), engine_model()
    loop.stall()
    model.submit(request(0, 5), now_ms=0)
    running = asyncio.create_task(loop.run(model))
    for _ in range(20):
        await asyncio.sleep(0)
    assert log.steps == 0
    assert loop.stalled
    loop.resume()
    await asyncio.wait_for(outlet.complete.wait(), 30)
    running.cancel()
    assert [token.index for token in outlet.produced] == [0, 1, 2, 3, 4]
    assert outlet.settlements >= log.steps
