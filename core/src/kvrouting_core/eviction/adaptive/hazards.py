"""The rate of reuse by class and age, each class shrunk towards coarser ones as far as its own data are few."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvrouting_core.eviction.adaptive.ages import BUCKETS, AgeBuckets
from kvrouting_core.eviction.adaptive.monitor import Counts

LEVEL_WEIGHT = 1.0
SHAPE_WEIGHT = 8.0
LEVELS = ((0, 0), (2, 0b11000000), (4, 0b11110000), (8, 0b11111111))
"""(bits, mask) of a label that name a class, coarse to fine: all, hits, hits and continuation, everything."""

Hazards = list[float]
"""One rate for each bucket of age, per block accessed."""


def estimate(counts: Mapping[int, Counts], ages: AgeBuckets, *, clump: float) -> dict[int, Hazards]:
    """Hazards of each class that has data of its own, by label, and of their ancestors by label and level.

    clump: sampled blocks of a request: they are hit together, so as many hits are one observation.
    Returns: (masked label | level << 8) → hazards; level 0 has the key 0.
    """
    parents: dict[int, Hazards] = {0: _root(counts, ages, clump)}
    found = {key_of(0, 0): parents[0]}
    for level in range(1, len(LEVELS)):
        mask, above = LEVELS[level][1], LEVELS[level - 1][1]
        children: dict[int, Hazards] = {}
        for label, (hits, exposure) in _summed(counts, mask).items():
            children[label] = _shrunk(hits, exposure, parents[label & above], clump)
            found[key_of(label, level)] = children[label]
        parents = children
    return found


def key_of(label: int, level: int) -> int:
    """The key of a label's class at a level, 0..3."""
    return (label & LEVELS[level][1]) | level << 8


def _root(counts: Mapping[int, Counts], ages: AgeBuckets, clump: float) -> Hazards:
    prior = [0.3 / (ages.middle(bucket) + ages.starts[1] / 4) for bucket in range(BUCKETS)]
    hits, exposure = _summed(counts, 0).get(0, ([0.0] * BUCKETS, [0.0] * BUCKETS))
    return _shrunk(hits, exposure, prior, clump)


def _summed(counts: Mapping[int, Counts], mask: int) -> dict[int, tuple[list[float], list[float]]]:
    """Hits and exposure by masked label."""
    sums: dict[int, tuple[list[float], list[float]]] = {}
    for label, own in counts.items():
        hits, exposure = sums.setdefault(label & mask, ([0.0] * BUCKETS, [0.0] * BUCKETS))
        for bucket in range(BUCKETS):
            hits[bucket] += own.hits[bucket]
            exposure[bucket] += own.exposure[bucket]
    return sums


def _shrunk(hits: Sequence[float], exposure: Sequence[float], parent: Hazards, clump: float) -> Hazards:
    """First the parent's level is fitted by one factor, then its shape bucket by bucket."""
    expected = sum(time * rate for time, rate in zip(exposure, parent, strict=True))
    factor = (sum(hits) + LEVEL_WEIGHT * clump) / (expected + LEVEL_WEIGHT * clump)
    weight = SHAPE_WEIGHT * clump
    return [
        factor * rate * (count + weight) / (time * factor * rate + weight)
        for count, time, rate in zip(hits, exposure, parent, strict=True)
    ]
