"""Policies that evict leaf by leaf in an order given by each leaf's history: Leaf-LRU, LFU and SLRU.

They do what SGLang 0.5 does with `--radix-eviction-policy lru|lfu|slru`: they take whole leaves, also where
a part would do, so one call may free more than it was asked for; a parent whose last child is gone joins
the queue with its own history. SGLang builds a heap of all leaves in each call; the queue here persists, so
a call costs O(victims · log leaves).
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from kvrouting_core.eviction.base import EvictionPolicy, ExposeParent, PathAccess
from kvrouting_core.eviction.lazy_heap import LazyHeap, QueuedRecord


class HistoryRecord(QueuedRecord):
    """last_access: number of the last access, from 1; 0 for never. hits: requests that loaded or found the
    node.
    """

    __slots__ = ("hits", "last_access")

    def __init__(self, owner: Any, pages: int, *, last_access: int = 0, hits: int = 0) -> None:
        super().__init__(owner, pages)
        self.last_access = last_access
        self.hits = hits


class WholeLeaves(EvictionPolicy[HistoryRecord]):
    """Evicts the unlocked leaf with the smallest `priority`, whole, until enough pages are free.

    A request counts once in `hits` of each node of its path: as 1 in a node that it loads, as +1 in a node
    that it finds when admitted. (SGLang counts inserts, and inserts the prompt a second time with the
    answer, so there the two inserts of the very request that loaded a node already make 2.) The order of
    accesses is that of the calls, so no clock is needed.
    """

    def __init__(self) -> None:
        self._accesses = 0
        self._leaves: LazyHeap[HistoryRecord] = LazyHeap()

    @abstractmethod
    def priority(self, record: HistoryRecord) -> Any:
        """What the leaves are ordered by, ascending: the smallest is evicted first."""

    def record(self, owner: Any, pages: int) -> HistoryRecord:
        return HistoryRecord(owner, pages)

    def admitted(self, access: PathAccess[HistoryRecord]) -> None:
        for record in access.records:
            record.hits += 1
        self._accessed(access)

    def inserted(self, access: PathAccess[HistoryRecord]) -> None:
        for record in access.records:
            if record.hits == 0:
                record.hits = 1
        self._accessed(access)

    def split(self, record: HistoryRecord, prefix_owner: Any, prefix_pages: int) -> HistoryRecord:
        record.pages -= prefix_pages
        return HistoryRecord(prefix_owner, prefix_pages, last_access=record.last_access, hits=record.hits)

    def evictable(self, record: HistoryRecord) -> None:
        self._leaves.push(self.priority(record), record)

    def pinned(self, record: HistoryRecord) -> None:
        self._leaves.withdraw(record)

    def choose(self, pages: int, expose_parent: ExposeParent) -> list[tuple[HistoryRecord, int]]:
        victims: list[tuple[HistoryRecord, int]] = []
        while pages > 0:
            record = self._leaves.pop()
            if record is None:
                break
            victims.append((record, record.pages))
            pages -= record.pages
            parent = expose_parent(record)
            if parent is not None:
                self.evictable(parent)
        return victims

    def clear(self) -> None:
        self._leaves = LazyHeap()

    def _accessed(self, access: PathAccess[HistoryRecord]) -> None:
        self._accesses += 1
        for record in access.records:
            record.last_access = self._accesses
        if access.records and access.records[-1].ticket:  # only the deepest node of a path can be a leaf
            self._leaves.withdraw(access.records[-1])
            self.evictable(access.records[-1])


class LeafLRU(WholeLeaves):
    """Evicts the unlocked leaf with the oldest last access: SGLang's default, (B − L + 2)-competitive."""

    def priority(self, record: HistoryRecord) -> int:
        return record.last_access


class LFU(WholeLeaves):
    """Evicts the unlocked leaf that the fewest requests have used; among equals the one with the oldest
    access.
    """

    def priority(self, record: HistoryRecord) -> tuple[int, int]:
        return record.hits, record.last_access


class SegmentedLRU(WholeLeaves):
    """Evicts leaves that fewer than `protected_hits` requests have used before all others; within each
    segment by LRU.
    """

    def __init__(self, *, protected_hits: int = 2) -> None:
        if protected_hits < 1:
            raise ValueError(f"protected_hits must be at least 1, got {protected_hits}")
        super().__init__()
        self._protected_hits = protected_hits

    def priority(self, record: HistoryRecord) -> tuple[bool, int]:
        return record.hits >= self._protected_hits, record.last_access
