"""Drives an engine model in real time: start a step, wait until it is due, hand out its tokens, again.

Deadlines are absolute: a step starts when the one before it was due, however late the process woke up, so the
engine keeps its nominal speed on a busy machine. Only after a long stop of the whole process is the lost time lost.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvrouting_simulator.engine_model import EngineModel, Step, TokenProduced
from kvrouting_simulator.engine_process.engine_clock import EngineClock

# In real time. More than the usual lateness of a loaded machine, less than any stop that somebody means.
_LOST_AFTER_MS = 250.0
_KEPT_STEPS = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """One step that ended. Engine ms, lateness and publishing in real ms.

    late_ms: from the deadline to the moment when the process saw it. publish_ms: time that handing out events and
    load took after the step.
    """

    kind: str
    start_ms: float
    duration_ms: float
    late_ms: float
    publish_ms: float
    tokens: int


class StepLog:
    """The last steps and their totals. late: hears the lateness of each step in s."""

    def __init__(self, late: Callable[[float], None]) -> None:
        self._late = late
        self.recent: deque[StepRecord] = deque(maxlen=_KEPT_STEPS)
        self.steps = 0
        self.busy_ms = 0.0
        self.lost_ms = 0.0

    def add(self, record: StepRecord) -> None:
        """A step ended."""
        self.recent.append(record)
        self.steps += 1
        self.busy_ms += record.duration_ms
        self._late(record.late_ms / 1000)


class StepOutlet(Protocol):
    """Where a step's results go."""

    def tokens(self, produced: Sequence[TokenProduced]) -> None:
        """The tokens of the step that just ended."""

    def started(self) -> None:
        """A step began."""

    def settled(self) -> None:
        """A step ended, or the engine has nothing to do: publish what changed."""


class StepLoop:
    """The scheduler's loop of one rank."""

    def __init__(
        self,
        *,
        clock: EngineClock,
        outlet: StepOutlet,
        log: StepLog,
    ) -> None:
        self._clock = clock
        self._outlet = outlet
        self._log = log
        self._work = asyncio.Event()
        self._go = asyncio.Event()
        self._go.set()
        self.model_ms = 0.0
        """Time of the model: that of the last step boundary. Requests in between join at the next one."""

    @property
    def stalled(self) -> bool:
        """Whether no step is started for now."""
        return not self._go.is_set()

    async def moving(self) -> None:
        """Returns when the loop is not stalled."""
        await self._go.wait()

    def wake(self) -> None:
        """There may be something to do: a request came, or a change waits to be published."""
        self._work.set()

    def stall(self) -> None:
        """No step is started until `resume`; the one in progress does not end before it either."""
        self._go.clear()

    def resume(self) -> None:
        """Steps again."""
        self._go.set()

    async def run(self, model: EngineModel) -> None:
        """Steps the model until cancelled."""
        start_ms = self._now_ms()
        while True:
            if not self._go.is_set():
                await self._go.wait()
                start_ms = self._now_ms()
            self._work.clear()
            self.model_ms = start_ms
            step = model.start_step(now_ms=start_ms)
            if step is None:
                self._outlet.settled()
                await self._work.wait()
                start_ms = self._now_ms()
            else:
                self._outlet.started()
                start_ms = await self._finish(model, step, start_ms)

    async def _finish(self, model: EngineModel, step: Step, start_ms: float) -> float:
        """Waits for the step's end and hands out its results; returns when the next one starts."""
        clock, due_ms = self._clock, start_ms + step.duration_ms
        await clock.sleep_until(due_ms)
        if not self._go.is_set():
            await self._go.wait()
            due_ms = max(due_ms, clock.now_ms())
        seen_ms = clock.now_ms()
        self.model_ms = due_ms
        produced = model.finish_step(step, now_ms=due_ms)
        self._outlet.tokens(produced)
        self._outlet.settled()
        self._log.add(
            StepRecord(
                kind=step.kind.value,
                start_ms=start_ms,
                duration_ms=step.duration_ms,
                late_ms=max(0.0, seen_ms - due_ms) / clock.speed,
                publish_ms=(clock.now_ms() - seen_ms) / clock.speed,
                tokens=len(produced),
            )
        )
        return self._next_start(due_ms)

    def _now_ms(self) -> float:
        # A timer may fire a little early, so that the last deadline still lies ahead: the model's time never goes back.
        return max(self.model_ms, self._clock.now_ms())

    def _next_start(self, due_ms: float) -> float:
        now_ms = self._clock.now_ms()
        lost_ms = now_ms - due_ms
        if lost_ms / self._clock.speed <= _LOST_AFTER_MS:
            return due_ms
        self._log.lost_ms += lost_ms
        return now_ms
