"""The Gittins index of a block: how much reuse it promises for the room it takes.

The index at an age is the largest, over all times T, of P(used within T) / E[min(time to use, T)]: the best rate of
hits that keeping the block for a while can give (Gittins, "Bandit processes and dynamic allocation indices", 1979).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvrouting_core.eviction.adaptive.ages import BUCKETS, EDGES_PER_DOUBLING, AgeBuckets
from kvrouting_core.eviction.adaptive.hazards import Hazards

STEPS_PER_DOUBLING = 4
LOWEST_AGE_SHARE = 1 / 32
DOUBLINGS = 8
QUANTA = 128
"""Ages are told apart by at least 1 / QUANTA of the capacity."""


class AgeGrid:
    """The ages at which an index is tabled: capacity / 32 · 2^(i / 4), i from 0 up to eight capacities.

    steps[age >> quantum_bits]: the place in a table for an age, up to sixteen capacities. quantum: 2^quantum_bits.
    """

    def __init__(self, ages: AgeBuckets, capacity: int) -> None:
        self.quantum_bits = max(0, (capacity // QUANTA).bit_length() - 1)
        lowest = capacity * LOWEST_AGE_SHARE
        self.quantum = quantum = 1 << self.quantum_bits
        middles = (quanta * quantum + (quantum - 1) / 2 for quanta in range((16 * capacity) // quantum + 1))
        self._last = DOUBLINGS * STEPS_PER_DOUBLING
        self.steps = bytes(
            int(min(self._last, STEPS_PER_DOUBLING * math.log2(max(1.0, age / lowest)))) for age in middles
        )
        self._places: list[tuple[int, float]] = []
        for step in range(self._last + 1):
            age = lowest * 2 ** (step / STEPS_PER_DOUBLING)
            pool_index = max(0.0, math.log2(age / ages.starts[1]) * EDGES_PER_DOUBLING + 1)
            lower = int(min(pool_index, BUCKETS - 2))
            self._places.append((lower, min(1.0, pool_index - lower)))

    def step_of(self, age: int) -> int:
        """The place in a table for any age >= 0."""
        quanta = age >> self.quantum_bits
        return self.steps[quanta] if quanta < len(self.steps) else self._last

    def between(self, at_edges: Sequence[float]) -> list[float]:
        """A table: values at the ages of the grid, given those at the starts of the buckets."""
        lows, highs = at_edges, at_edges[1:]
        return [lows[pool_index] + (highs[pool_index] - lows[pool_index]) * share for pool_index, share in self._places]


def index_at_edges(hazards: Hazards, ages: AgeBuckets) -> list[float]:
    """The index at the start of each bucket.

    From the last bucket on: waiting goes on as long as what follows promises more than what lies before it, so a bucket
    takes in the stretch that begins behind it while that one's index is higher.
    """
    indices: list[float] = []
    intervals: list[tuple[float, float, float]] = []  # index, P(used within it), E[time to use or its end]
    for rate, width in zip(reversed(hazards), reversed(ages.widths), strict=True):
        used = 1.0 if math.isinf(width) else -math.expm1(-rate * width)
        waited = used / rate
        index = rate
        while intervals and intervals[-1][0] > index:
            _, later, wait = intervals.pop()
            waited += (1 - used) * wait
            used += (1 - used) * later
            index = used / waited
        intervals.append((index, used, waited))
        indices.append(index)
    indices.reverse()
    return indices
