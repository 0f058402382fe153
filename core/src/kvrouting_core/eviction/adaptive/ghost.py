"""RLT without a cache: which blocks it would hold, had it served the same requests with coins of its own."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence


class _GhostPage:
    """size: in pages of the tree. mark: number of the phase of the last access. pool: the pool of leaves that it lies
    in, or None; slot: where.
    """

    __slots__ = ("children", "mark", "name", "parent", "pool", "size", "slot")

    def __init__(self, name: int, size: int, parent: _GhostPage | None, mark: int) -> None:
        self.name = name
        self.size = size
        self.parent = parent
        self.children = 0
        self.mark = mark
        self.pool: list[_GhostPage] | None = None
        self.slot = 0


class GhostRLT:
    """Names alone, one node for each, closed under prefixes; the marking algorithm of `RandomizedLeafTokens`.

    capacity: pages held at most. is_locked: whether the real cache holds a name for a
    running request; such a leaf stays. on_load, on_evict: hear of each name that comes and goes. names: a view of those
    held.
    """

    def __init__(
        self,
        *,
        capacity: int,
        rng: random.Random,
        is_locked: Callable[[int], bool],
        on_load: Callable[[int], None],
        on_evict: Callable[[int], None],
    ) -> None:
        self._capacity = capacity
        self._rng = rng
        self._is_locked = is_locked
        self._on_load = on_load
        self._on_evict = on_evict
        self._phase = 1
        self._pages: dict[int, _GhostPage] = {}
        self.names = self._pages.keys()
        self._used = 0
        self._unmarked: list[_GhostPage] = []
        self._marked: list[_GhostPage] = []
        self._parked: dict[_GhostPage, None] = {}
        self._tip: _GhostPage | None = None  # of the path that is being accessed: it stays, whatever its children do

    def __len__(self) -> int:
        return len(self._pages)

    @property
    def used(self) -> int:
        """Pages held."""
        return self._used

    def __contains__(self, name: object) -> bool:
        return name in self._pages

    def access(self, names: Sequence[int], *, size: int = 1, last_size: int | None = None) -> int:
        """A request uses a path. Returns how many of its names, the last ones, had to be loaded.

        size: pages of each name; last_size: of the last one, None for the same. What does not fit beside locked paths
        counts as loaded and is not kept.
        """
        path = self._found(names)
        phase, found = self._phase, len(path)
        tip = path[-1] if path else None
        if tip is not None:
            self._leave_pool(tip)
        self._return_parked()
        for pool_index in range(found, len(names)):
            name = names[pool_index]
            self._tip = tip
            if last_size is not None and pool_index == len(names) - 1:
                size = last_size
            if not self._make_room(size):
                break
            page = _GhostPage(name, size, tip, self._phase)
            self._used += size
            if tip is not None:
                tip.children += 1
            self._pages[name] = page
            self._on_load(name)
            path.append(page)
            tip = page
        if self._phase != phase:
            for page in path:
                page.mark = self._phase
        self._tip = None
        if tip is not None and not tip.children:
            self._enter_pool(tip)
        return len(names) - found

    def evict(self) -> bool:
        """Gives one name up, as if a page had to be loaded. Returns whether there was one."""
        self._return_parked()
        return self._evict_one()

    def clear(self) -> None:
        """Nothing is held; the coins stay."""
        self._phase += 1
        self._used = 0
        self._pages.clear()
        self._unmarked, self._marked, self._parked = [], [], {}

    def _found(self, names: Sequence[int]) -> list[_GhostPage]:
        """The pages of the leading names that are held, marked."""
        found: list[_GhostPage] = []
        held, phase = self._pages.get, self._phase
        for name in names:
            page = held(name)
            if page is None:
                break
            page.mark = phase
            found.append(page)
        return found

    def _make_room(self, size: int) -> bool:
        while self._used + size > self._capacity:
            if not self._evict_one():
                return False
        return True

    def _evict_one(self) -> bool:
        while True:
            if not self._unmarked:
                if not self._marked:
                    return False
                self._phase += 1
                self._unmarked, self._marked = self._marked, self._unmarked
            pool = self._unmarked
            page = pool[int(self._rng.random() * len(pool))]
            self._leave_pool(page)
            if self._is_locked(page.name):
                self._parked[page] = None
                continue
            del self._pages[page.name]
            self._used -= page.size
            parent = page.parent
            if parent is not None:
                parent.children -= 1
                if not parent.children and parent is not self._tip:
                    self._enter_pool(parent)
            self._on_evict(page.name)
            return True

    def _return_parked(self) -> None:
        """Lets leaves back in whose locks have ended."""
        for page in [page for page in self._parked if not self._is_locked(page.name)]:
            del self._parked[page]
            self._enter_pool(page)

    def _enter_pool(self, page: _GhostPage) -> None:
        pool = self._marked if page.mark == self._phase else self._unmarked
        page.pool = pool
        page.slot = len(pool)
        pool.append(page)

    def _leave_pool(self, page: _GhostPage) -> None:
        pool = page.pool
        if pool is None:
            self._parked.pop(page, None)
            return
        last = pool.pop()
        if last is not page:
            pool[page.slot] = last
            last.slot = page.slot
        page.pool = None
