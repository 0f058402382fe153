"""Faults of the event stream that a test can order: lost, doubled and late batches."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchFate:
    """What happens to one batch. copies: how often it is sent live, 0: lost. replayable: kept for replay."""

    copies: int = 1
    replayable: bool = True
    delay_s: float = 0.0


_FINE = BatchFate()


class EventFaults:
    """Decides the fate of each batch at the moment when the scheduler publishes it."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._drop_batches = 0
        self._drop_probability = 0.0
        self._drop_replayable = True
        self._duplicate_batches = 0
        self._delay_s = 0.0

    def drop(self, *, batches: int = 0, probability: float = 0.0, replayable: bool = True) -> None:
        """Loses the next `batches`, and each later one with `probability`; `replayable`: only live, not for replay."""
        self._drop_batches, self._drop_probability = batches, probability
        self._drop_replayable = replayable

    def duplicate(self, *, batches: int) -> None:
        """Sends the next `batches` twice."""
        self._duplicate_batches = batches

    def delay(self, *, seconds: float) -> None:
        """Sends every batch so much later, in order; 0 ends it."""
        self._delay_s = seconds

    def clear(self) -> None:
        """No faults from now on."""
        self._drop_batches = self._duplicate_batches = 0
        self._drop_probability = self._delay_s = 0.0

    def fate(self) -> BatchFate:
        """The fate of the next batch; counts it."""
        if self._loses_one():
            return BatchFate(copies=0, replayable=self._drop_replayable, delay_s=self._delay_s)
        if self._duplicate_batches:
            self._duplicate_batches -= 1
            return BatchFate(copies=2, delay_s=self._delay_s)
        return BatchFate(delay_s=self._delay_s) if self._delay_s else _FINE

    def _loses_one(self) -> bool:
        if self._drop_batches:
            self._drop_batches -= 1
            return True
        return self._drop_probability > 0 and self._rng.random() < self._drop_probability
