"""The engine's time in ms: real time times the speed at which the simulated engine runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from kvrouting_simulator.bounds import positive


class EngineClock(Protocol):
    """What the step loop needs of time. All times are engine ms since the clock's start."""

    speed: float

    def now_ms(self) -> float:
        """The present."""

    async def sleep_until(self, deadline_ms: float) -> None:
        """Returns at the deadline, at once if it has passed."""


class RealClock:
    """Real time, `speed` times as fast: at 10 an engine's second takes a tenth of one."""

    def __init__(self, *, speed: float, monotonic_s: Callable[[], float]) -> None:
        positive("speed", speed)
        self.speed = speed
        self._monotonic_s = monotonic_s
        self._start_s = monotonic_s()

    def now_ms(self) -> float:
        """The present."""
        return (self._monotonic_s() - self._start_s) * 1000 * self.speed

    async def sleep_until(self, deadline_ms: float) -> None:
        """Returns at the deadline; if it has passed, other tasks get one turn."""
        await asyncio.sleep(max(0.0, deadline_ms - self.now_ms()) / 1000 / self.speed)
