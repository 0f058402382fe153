"""When requests arrive: open loops by chance, and recorded times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvrouting_simulator.bounds import positive

Times = npt.NDArray[np.float64]
"""Arrivals in ms, ascending, the first at 0."""


class Arrivals(Protocol):
    """Gives the arrivals of one run."""

    def times_ms(self, count: int, rng: np.random.Generator) -> Times:
        """The first `count` arrivals. Raises: ValueError if there are not so many."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PoissonArrivals:
    """Open loop with exponential gaps."""

    rate_per_s: float = 12.0

    def __post_init__(self) -> None:
        positive("rate_per_s", self.rate_per_s)

    def times_ms(self, count: int, rng: np.random.Generator) -> Times:
        """The first `count` arrivals."""
        return _from_gaps(rng.exponential(1000 / self.rate_per_s, max(0, count - 1)))


@dataclass(frozen=True, kw_only=True, slots=True)
class GammaArrivals:
    """Open loop with gamma-distributed gaps: bursts with a coefficient of variation above 1, Poisson at 1."""

    rate_per_s: float = 12.0
    cv: float = 3.0

    def __post_init__(self) -> None:
        positive("rate_per_s", self.rate_per_s)
        positive("cv", self.cv)

    def times_ms(self, count: int, rng: np.random.Generator) -> Times:
        """The first `count` arrivals. Shape 1/cv² and the rate's mean give the gaps this cv."""
        shape = self.cv**-2
        return _from_gaps(rng.gamma(shape, 1000 / self.rate_per_s / shape, max(0, count - 1)))


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedArrivals:
    """Times of a trace, ascending ms; speed 2 halves the gaps."""

    recorded_ms: Sequence[float]
    speed: float = 1.0

    def __post_init__(self) -> None:
        positive("speed", self.speed)

    def times_ms(self, count: int, rng: np.random.Generator) -> Times:  # noqa: ARG002 - nothing is left to chance
        """The first `count` arrivals. Raises: ValueError if fewer are recorded."""
        if count > len(self.recorded_ms):
            raise ValueError(f"{count} arrivals are wanted, the trace has {len(self.recorded_ms)}")
        times = np.asarray(self.recorded_ms[:count], dtype=np.float64)
        return (times - times[0]) / self.speed if count else times


def _from_gaps(gaps: Times) -> Times:
    return np.concatenate([np.zeros(1), np.cumsum(gaps)])
