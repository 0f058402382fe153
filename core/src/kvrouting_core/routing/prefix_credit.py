"""Prefixes that a worker is about to hold: dispatched to it, not yet in the index."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence


class InFlightPrefixes:
    """Blocks that one worker's dispatched requests will leave in its cache, each with the number of requests."""

    __slots__ = ("counts",)

    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()  # to be read, not changed

    def __len__(self) -> int:
        """Distinct blocks."""
        return len(self.counts)

    def add(self, blocks: Sequence[int]) -> None:
        """Credits the blocks for one request."""
        self.counts.update(blocks)

    def remove(self, blocks: Sequence[int]) -> None:
        """Takes back what `add` credited for one request. Raises: KeyError if it did not."""
        counts = self.counts
        for block in blocks:
            if counts[block] > 1:
                counts[block] -= 1
            else:
                counts.pop(block)

    def clear(self) -> None:
        """Voids all credit: the worker's cache is gone."""
        self.counts.clear()

    def depth(self, blocks: Sequence[int], held: int) -> int:
        """Leading blocks that the worker holds or is about to hold.

        held: leading blocks that the index reports, 0..B. Returns: held..B. A block's hash stands for the whole prefix
        before it, so what a request left beyond `held` has no holes and is searched by bisection.
        """
        counts, length = self.counts, len(blocks)
        if held >= length or blocks[held] not in counts:
            return held
        if blocks[length - 1] in counts:
            return length
        low, high = held + 1, length - 1
        while low < high:
            middle = (low + high + 1) // 2
            if blocks[middle - 1] in counts:
                low = middle
            else:
                high = middle - 1
        return low
