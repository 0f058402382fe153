"""Watches a sample of all blocks, cached or not, and counts after how long they are asked for again."""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict

from kvrouting_core.eviction.adaptive.ages import BUCKETS, AgeBuckets


class Counts:
    """Of one class: hits[j]: uses at an age in bucket j. exposure[j]: time spent there, in blocks accessed."""

    __slots__ = ("exposure", "hits", "passed", "rest")

    def __init__(self) -> None:
        self.hits = [0.0] * BUCKETS
        self.exposure = [0.0] * BUCKETS
        self.passed = [0] * BUCKETS  # ends of exposure in each bucket, minus beginnings
        self.rest = [0.0] * BUCKETS  # how far into the bucket these lie, summed alike

    def fold(self, ages: AgeBuckets) -> None:
        """Adds to the exposure what was only counted by its ends."""
        beyond = 0
        for bucket in range(BUCKETS - 1, -1, -1):
            self.exposure[bucket] += self.rest[bucket]
            if beyond:
                self.exposure[bucket] += beyond * ages.widths[bucket]
            beyond += self.passed[bucket]
        self.passed = [0] * BUCKETS
        self.rest = [0.0] * BUCKETS

    def fade(self, factor: float) -> None:
        """Counts for less from now on."""
        self.hits = [value * factor for value in self.hits]
        self.exposure = [value * factor for value in self.exposure]


def sampling_period(capacity: int) -> int:
    """One name in so many is watched; a power of two."""
    if capacity < 8192:
        return 8
    return 16 if capacity < 32768 else 64


class Monitor:
    """Entries: name → (label, time of the last use), the least recently used first, at most 8·capacity / period."""

    def __init__(self, capacity: int) -> None:
        self.ages = AgeBuckets(capacity)
        self.counts: dict[int, Counts] = {}
        self.mask = sampling_period(capacity) - 1
        self._size = max(1, 8 * capacity // (self.mask + 1))
        self._entries: OrderedDict[int, tuple[int, int]] = OrderedDict()
        self._settled = 0

    def __len__(self) -> int:
        return len(self._entries)

    def label_of(self, name: int) -> int | None:
        """The class in which a name is watched."""
        entry = self._entries.get(name)
        return None if entry is None else entry[0]

    def used(self, name: int, label: int, *, now: int) -> None:
        """A sampled name was asked for, and is in a class from now on."""
        entries = self._entries
        before = entries.pop(name, None)
        if before is not None:
            old_label, since = before
            self._expose(old_label, since, now)
            self.counts[old_label].hits[self.ages.of(now - since)] += 1
        entries[name] = (label, now)
        if len(entries) > self._size:
            _, (old_label, since) = entries.popitem(last=False)
            self._expose(old_label, since, now)

    def settle(self, *, now: int) -> None:
        """Brings all exposure up to this time."""
        expose = self._expose
        for label, since in self._entries.values():
            expose(label, since, now)
        self._settled = now
        for counts in self.counts.values():
            counts.fold(self.ages)

    def fade(self, factor: float) -> None:
        """What was counted so far counts for less."""
        for counts in self.counts.values():
            counts.fade(factor)

    def clear(self) -> None:
        """Watches nothing; the counts stay."""
        self._entries.clear()

    def _expose(self, label: int, since: int, now: int) -> None:
        """Counts the time from the last use, or from the last `settle` on."""
        counts = self.counts.get(label)
        if counts is None:
            counts = self.counts[label] = Counts()
        starts = self.ages.starts
        age = now - since
        bucket = bisect_right(starts, age) - 1
        counts.passed[bucket] += 1
        counts.rest[bucket] += age - starts[bucket]
        counted = self._settled - since
        if counted > 0:
            bucket = bisect_right(starts, counted) - 1
            counts.passed[bucket] -= 1
            counts.rest[bucket] -= counted - starts[bucket]
