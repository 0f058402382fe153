"""RLT, randomized leaf token eviction (Wu, Silwal, Zhang, arXiv 2601.18999, Algorithm 1), at page
granularity.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from kvrouting_core.eviction.base import EvictionPolicy, ExposeParent, PathAccess
from kvrouting_core.eviction.tail_pool import PooledRecord, TailPool


class MarkedRecord(PooledRecord):
    """mark: number of the phase in which the node was last accessed; 0 for never."""

    __slots__ = ("mark",)

    def __init__(self, owner: Any, pages: int, mark: int) -> None:
        super().__init__(owner, pages)
        self.mark = mark


class RandomizedLeafTokens(EvictionPolicy[MarkedRecord]):
    """A marking algorithm: evicts leaf pages uniformly at random among the unmarked ones; Θ(log(B −
    L))-competitive.

    A page is marked when a request that finds it is admitted, or when it is loaded. When a page must go and
    every leaf page in reach is marked, a new phase starts with no marks.

    The paper starts a phase also when B + 1 distinct tokens have been marked, and then keeps the mark of
    the one accessed last. No counter is needed for that: marked tokens are not evicted within their phase,
    so B of them fill the cache, and the access to one more is a load that finds no unmarked leaf token. The
    token accessed last is the one being loaded.

    Marks never need a finer grain than nodes: a path that ends within a node splits it first, and a phase
    starts only while victims are chosen, hence never between two pages of one access. No operation walks
    over the tree: clearing all marks is one increment, and the pool of marked leaves then becomes the pool
    to draw from (the other one is empty).
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._phase = 1
        self._marked_pages = 0
        self._unmarked: TailPool[MarkedRecord] = TailPool()
        self._marked: TailPool[MarkedRecord] = TailPool()

    @property
    def phase(self) -> int:
        """Number of the current phase, from 1."""
        return self._phase

    @property
    def marked_pages(self) -> int:
        """Cached pages that were accessed in this phase; none of them is evicted before the next one."""
        return self._marked_pages

    def record(self, owner: Any, pages: int) -> MarkedRecord:
        return MarkedRecord(owner, pages, 0)

    def admitted(self, access: PathAccess[MarkedRecord]) -> None:
        self._mark(access.records)

    def inserted(self, access: PathAccess[MarkedRecord]) -> None:
        self._mark(access.records)

    def split(self, record: MarkedRecord, prefix_owner: Any, prefix_pages: int) -> MarkedRecord:
        record.pages -= prefix_pages
        return MarkedRecord(prefix_owner, prefix_pages, record.mark)

    def evictable(self, record: MarkedRecord) -> None:
        (self._marked if record.mark == self._phase else self._unmarked).add(record)

    def pinned(self, record: MarkedRecord) -> None:
        if record.pool is not None:
            record.pool.remove(record)

    def choose(self, pages: int, expose_parent: ExposeParent) -> list[tuple[MarkedRecord, int]]:
        taken: dict[MarkedRecord, int] = {}
        while pages > 0:
            if not self._unmarked:
                if not self._marked:
                    break
                self._start_phase()
            drawn, emptied = self._unmarked.draw(pages, taken, self._rng)
            pages -= drawn
            if emptied is not None:
                parent = expose_parent(emptied)
                if parent is not None:
                    self.evictable(parent)
        return list(taken.items())

    def clear(self) -> None:
        self._phase += 1
        self._marked_pages = 0
        self._unmarked = TailPool()
        self._marked = TailPool()

    def _mark(self, records: Sequence[MarkedRecord]) -> None:
        phase = self._phase
        for record in records:
            if record.mark != phase:
                record.mark = phase
                self._marked_pages += record.pages
        if records and records[-1].pool is self._unmarked:  # only the deepest node of a path can be a leaf
            self._unmarked.remove(records[-1])
            self._marked.add(records[-1])

    def _start_phase(self) -> None:
        self._phase += 1
        self._marked_pages = 0
        self._unmarked, self._marked = self._marked, self._unmarked
