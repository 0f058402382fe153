"""Growing pauses between attempts, with jitter so that many clients do not come back at once."""

from __future__ import annotations

import random


class Backoff:
    """Doubles from `first_s` to `limit_s`; each pause is drawn from its upper half."""

    def __init__(self, rng: random.Random, *, first_s: float = 0.1, limit_s: float = 5.0) -> None:
        if not 0 < first_s <= limit_s:
            raise ValueError(f"backoff from {first_s} s to {limit_s} s: the first must be above 0 and the smaller")
        self._rng = rng
        self._first_s = first_s
        self._limit_s = limit_s
        self._pause_s = first_s

    def next_s(self) -> float:
        """The pause before the next attempt."""
        pause_s, self._pause_s = self._pause_s, min(self._limit_s, 2 * self._pause_s)
        return pause_s * self._rng.uniform(0.5, 1.0)

    def reset(self) -> None:
        """An attempt succeeded."""
        self._pause_s = self._first_s
