"""Uniform random eviction of leaf pages, without marks: the baseline that shows what RLT's marks do."""

from __future__ import annotations

import random
from typing import Any

from kvrouting_core.eviction.base import EvictionPolicy, ExposeParent, PathAccess
from kvrouting_core.eviction.tail_pool import PooledRecord, TailPool


class UniformLeafTokens(EvictionPolicy[PooledRecord]):
    """Evicts one leaf page at a time, uniformly at random among the last pages of all unlocked leaves."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._leaves: TailPool[PooledRecord] = TailPool()

    def record(self, owner: Any, pages: int) -> PooledRecord:
        return PooledRecord(owner, pages)

    def admitted(self, access: PathAccess[PooledRecord]) -> None:
        """Accesses do not matter to this policy."""

    def inserted(self, access: PathAccess[PooledRecord]) -> None:
        """Accesses do not matter to this policy."""

    def split(self, record: PooledRecord, prefix_owner: Any, prefix_pages: int) -> PooledRecord:
        record.pages -= prefix_pages
        return PooledRecord(prefix_owner, prefix_pages)

    def evictable(self, record: PooledRecord) -> None:
        self._leaves.add(record)

    def pinned(self, record: PooledRecord) -> None:
        if record.pool is not None:
            record.pool.remove(record)

    def choose(self, pages: int, expose_parent: ExposeParent) -> list[tuple[PooledRecord, int]]:
        taken: dict[PooledRecord, int] = {}
        while pages > 0 and self._leaves:
            drawn, emptied = self._leaves.draw(pages, taken, self._rng)
            pages -= drawn
            if emptied is not None:
                parent = expose_parent(emptied)
                if parent is not None:
                    self.evictable(parent)
        return list(taken.items())

    def clear(self) -> None:
        self._leaves = TailPool()
