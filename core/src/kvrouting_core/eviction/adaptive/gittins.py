"""The Gittins index of a granule: how much reuse it promises for the room it takes.

The index at an age is the largest, over all times T, of P(used within T) / E[min(time to use, T)]: the best rate of
hits that keeping the granule for a while can give (Gittins, "Bandit processes and dynamic allocation indices", 1979).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from kvrouting_core.eviction.adaptive.ages import BUCKETS, EDGES_PER_DOUBLING, AgeBuckets
from kvrouting_core.eviction.adaptive.hazards import Hazards

STEPS_PER_DOUBLING = 4
LONGEST_AGE_BITS = 40


class AgeGrid:
    """Where the ages 2^(i / STEPS_PER_DOUBLING), i from 0 on, lie between the edges, on a logarithmic scale."""

    def __init__(self, ages: AgeBuckets) -> None:
        self._places: list[tuple[int, float]] = []
        for step in range(LONGEST_AGE_BITS * STEPS_PER_DOUBLING):
            place = math.log2(2 ** (step / STEPS_PER_DOUBLING) / ages.starts[1]) * EDGES_PER_DOUBLING + 1
            lower = int(max(0.0, min(place, BUCKETS - 2)))
            self._places.append((lower, min(1.0, max(0.0, place - lower))))

    def between(self, at_edges: Sequence[float]) -> list[float]:
        """Values at all ages of the grid, given those at the starts of the buckets."""
        pairs = list(itertools.pairwise(at_edges))
        return [
            low + (high - low) * share
            for (low, high), share in ((pairs[lower], share) for lower, share in self._places)
        ]


def index_at_edges(hazards: Hazards, ages: AgeBuckets) -> list[float]:
    """The index at the start of each bucket."""
    spans = []
    for rate, width in zip(hazards, ages.widths, strict=True):
        lost = 1.0 if math.isinf(width) else -math.expm1(-rate * width)
        spans.append((lost, lost / rate))
    best = []
    for start in range(BUCKETS):
        alive, waited, highest = 1.0, 0.0, 0.0
        for lost, wait in spans[start:]:
            waited += alive * wait
            alive *= 1 - lost
            highest = max(highest, (1 - alive) / waited)
        best.append(highest)
    return best
