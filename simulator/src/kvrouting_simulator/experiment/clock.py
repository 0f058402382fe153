"""Virtual time: a heap of callbacks. Time passes only between them."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable


class VirtualClock:
    """Calls what was planned, in order of time and, at one time, in order of planning."""

    def __init__(self) -> None:
        self.now_ms = 0.0
        self._planned: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    @property
    def next_ms(self) -> float:
        """When the next planned call is due; infinity if none is."""
        return self._planned[0][0] if self._planned else math.inf

    def at(self, time_ms: float, action: Callable[[], None]) -> None:
        """Plans a call. Raises: ValueError for a time that has passed."""
        if time_ms < self.now_ms:
            raise ValueError(f"cannot plan at {time_ms} ms, it is {self.now_ms} ms")
        heapq.heappush(self._planned, (time_ms, self._count, action))
        self._count += 1

    def after(self, delay_ms: float, action: Callable[[], None]) -> None:
        """Plans a call delay_ms from now."""
        self.at(self.now_ms + delay_ms, action)

    def run(self) -> None:
        """Until nothing is planned."""
        planned = self._planned
        while planned:
            self.now_ms, _, action = heapq.heappop(planned)
            action()
