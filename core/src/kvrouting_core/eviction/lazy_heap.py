"""A priority queue of leaves whose entries are withdrawn without being searched for."""

from __future__ import annotations

import heapq
from typing import Any, Generic, TypeVar

from kvrouting_core.eviction.base import NodeRecord


class QueuedRecord(NodeRecord):
    """ticket: number of the record's valid entry in the queue; 0 while it has none."""

    __slots__ = ("ticket",)

    def __init__(self, owner: Any, pages: int) -> None:
        super().__init__(owner, pages)
        self.ticket = 0


Q = TypeVar("Q", bound=QueuedRecord)


class LazyHeap(Generic[Q]):
    """Smallest priority first, the older entry first among equals.

    Withdrawn entries stay in the heap until they surface, or until they outnumber the valid ones: every
    operation costs O(log n) amortised, n valid entries.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[Any, int, Q]] = []
        self._tickets = 0
        self._valid = 0

    def __len__(self) -> int:
        return self._valid

    @property
    def slots(self) -> int:
        """Entries held, withdrawn ones included; at most 2·len + 64."""
        return len(self._heap)

    def push(self, priority: Any, record: Q) -> None:
        """Enters a record that has no valid entry."""
        self._tickets += 1
        record.ticket = self._tickets
        self._valid += 1
        heapq.heappush(self._heap, (priority, record.ticket, record))

    def withdraw(self, record: Q) -> None:
        """Takes back the record's entry; without effect if it has none."""
        if record.ticket == 0:
            return
        record.ticket = 0
        self._valid -= 1
        if len(self._heap) > 2 * self._valid + 64:
            self._heap = [entry for entry in self._heap if entry[2].ticket == entry[1]]
            heapq.heapify(self._heap)

    def pop(self) -> Q | None:
        """Removes and returns the record with the smallest priority, or None if there is none."""
        while self._heap:
            _, ticket, record = heapq.heappop(self._heap)
            if record.ticket == ticket:
                record.ticket = 0
                self._valid -= 1
                return record
        return None
