"""Buckets of age, the time since the last access in blocks accessed, relative to the cache's capacity."""

from __future__ import annotations

import math
from bisect import bisect_right

BUCKETS = 16
FIRST_EDGE_SHARE = 1 / 16
EDGES_PER_DOUBLING = 2


class AgeBuckets:
    """Bucket 0 ends at capacity / 16; 15 edges, each √2 times the one before; the last bucket has no end.

    starts: of the buckets, ascending from 0. widths: of all but the last, whose width is infinite.
    """

    def __init__(self, capacity: int) -> None:
        first = capacity * FIRST_EDGE_SHARE
        edges = [first * 2 ** (i / EDGES_PER_DOUBLING) for i in range(BUCKETS - 1)]
        self.starts = [0.0, *edges]
        self.widths = [end - start for start, end in zip(self.starts, edges, strict=False)] + [math.inf]

    def of(self, age: float) -> int:
        """The bucket of an age >= 0."""
        return bisect_right(self.starts, age) - 1

    def middle(self, bucket: int) -> float:
        """An age within a bucket."""
        start = self.starts[bucket]
        return start * 1.5 if bucket == BUCKETS - 1 else start + self.widths[bucket] / 2
