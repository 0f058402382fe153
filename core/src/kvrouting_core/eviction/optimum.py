"""The offline optimum: eviction that knows the requests to come. The bound that every policy is held
against.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

from kvrouting_core.eviction.base import EvictionPolicy, ExposeParent, PathAccess
from kvrouting_core.eviction.future_uses import FutureUses, SharedUse
from kvrouting_core.eviction.lazy_heap import LazyHeap, QueuedRecord


class FutureRecord(QueuedRecord):
    """runs: the node's pages in path order as [[uses, pages]], uses shared by all pages of a run."""

    __slots__ = ("runs",)

    def __init__(self, owner: Any, pages: int, runs: list[tuple[SharedUse, int]]) -> None:
        super().__init__(owner, pages)
        self.runs = runs


class Optimum(EvictionPolicy[FutureRecord]):
    """OPT: evicts, page by page, the leaf page whose next use lies furthest in the future.

    Time is the number of admissions: the i-th call of `admitted` must be request i of the sequence.
    """

    def __init__(self, requests: Iterable[tuple[Hashable, Sequence[int]]], *, page_size: int) -> None:
        """requests: (namespace, prompt tokens) in the order of admission; page_size: that of the cache."""
        self._future = FutureUses(requests, page_size=page_size)
        self._now = -1
        self._leaves: LazyHeap[FutureRecord] = LazyHeap()

    def record(self, owner: Any, pages: int) -> FutureRecord:
        return FutureRecord(owner, pages, [])

    def admitted(self, access: PathAccess[FutureRecord]) -> None:
        """Raises: ValueError if the request is not the one that the sequence has at this place."""
        self._now += 1
        runs = self._future.segments(access.namespace, access.tokens)
        if any(not uses.used_at(self._now) for uses, _ in runs):
            raise ValueError(f"admission {self._now} is not request {self._now} of the announced sequence")

    def inserted(self, access: PathAccess[FutureRecord]) -> None:
        if all(record.runs for record in access.records):
            return
        runs = self._future.segments(access.namespace, access.tokens)
        for record in access.records:
            first, runs = _cut_runs(runs, record.pages)
            record.runs = record.runs or first

    def split(self, record: FutureRecord, prefix_owner: Any, prefix_pages: int) -> FutureRecord:
        record.pages -= prefix_pages
        first, record.runs = _cut_runs(record.runs, prefix_pages)
        return FutureRecord(prefix_owner, prefix_pages, first)

    def evictable(self, record: FutureRecord) -> None:
        self._leaves.push(-record.runs[-1][0].next_after(self._now), record)

    def pinned(self, record: FutureRecord) -> None:
        self._leaves.withdraw(record)

    def choose(self, pages: int, expose_parent: ExposeParent) -> list[tuple[FutureRecord, int]]:
        taken: dict[FutureRecord, int] = {}
        while pages > 0:
            record = self._leaves.pop()
            if record is None:
                break
            uses, length = record.runs.pop()
            cut = min(length, pages)
            pages -= cut
            taken[record] = taken.get(record, 0) + cut
            if cut < length:
                record.runs.append((uses, length - cut))
            leaf = record if record.runs else expose_parent(record)
            if leaf is not None:
                self.evictable(leaf)
        return list(taken.items())

    def clear(self) -> None:
        self._leaves = LazyHeap()


def _cut_runs(
    runs: list[tuple[SharedUse, int]], pages: int
) -> tuple[list[tuple[SharedUse, int]], list[tuple[SharedUse, int]]]:
    """Cuts runs after so many pages: (the first ones, the rest)."""
    first: list[tuple[SharedUse, int]] = []
    for place, (uses, length) in enumerate(runs):
        if length > pages:
            if pages:
                first.append((uses, pages))
            return first, [(uses, length - pages), *runs[place + 1 :]]
        first.append((uses, length))
        pages -= length
    return first, []
