"""A set of leaves out of which one leaf token is drawn uniformly, in constant time."""

from __future__ import annotations

import random
from typing import Any, Generic, TypeVar

from kvrouting_core.eviction.base import NodeRecord


class PooledRecord(NodeRecord):
    """A record that can lie in one pool at a time. pool: that pool or None; slot: its place there."""

    __slots__ = ("pool", "slot")

    def __init__(self, owner: Any, pages: int) -> None:
        super().__init__(owner, pages)
        self.pool: TailPool[Any] | None = None
        self.slot = 0


P = TypeVar("P", bound=PooledRecord)


class TailPool(Generic[P]):
    """Leaves in an array with swap-remove: each leaf has one leaf page, its last, so leaves are drawn with
    equal weight.
    """

    def __init__(self) -> None:
        self._records: list[P] = []

    def __len__(self) -> int:
        return len(self._records)

    def add(self, record: P) -> None:
        """Takes in a record that lies in no pool."""
        record.pool = self
        record.slot = len(self._records)
        self._records.append(record)

    def remove(self, record: P) -> None:
        """Lets go of one of its records; the last one takes its place."""
        records = self._records
        last = records.pop()
        if last is not record:
            records[record.slot] = last
            last.slot = record.slot
        record.pool = None

    def draw(self, pages: int, taken: dict[P, int], rng: random.Random) -> tuple[int, P | None]:
        """Draws one tail page at a time, `pages` times or until a leaf has none left. The pool must not be
        empty.

        taken: record -> pages drawn so far in this call of `choose`; counted up here.
        Returns (pages drawn, the leaf that ran empty and was let go of, or None).
        """
        records = self._records
        size = len(records)
        uniform = rng.random
        counted = taken.get
        for drawn in range(1, pages + 1):
            record = records[int(uniform() * size)]
            count = counted(record, 0) + 1
            taken[record] = count
            if count == record.pages:
                self.remove(record)
                return drawn, record
        return pages, None
