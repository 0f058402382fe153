"""The requests that a late-binding policy keeps, in the order in which they are planned."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Sequence
from operator import attrgetter

import numpy as np

from kvrouting_core.routing.ledger import Waiting
from kvrouting_core.routing.work_table import RequestCosts

_ORDER = attrgetter("order")
_NOT_ESTIMATED = RequestCosts([], [], np.empty(0), np.empty(0))


class Queued:
    """One request in the queue, with what it would cost on each worker.

    order: (key, number of arrival); the key never changes.
    costs: on each worker, as of estimated_at_ms.
    deepest: hash of the last block that any worker holds or is about to hold; None without any.
    least_ms: least prefill, over the workers.
    """

    __slots__ = ("blocks", "costs", "deepest", "estimated_at_ms", "least_ms", "order", "waiting")

    def __init__(self, waiting: Waiting) -> None:
        self.waiting = waiting
        self.blocks = waiting.request.blocks
        self.order: tuple[float, int] = (math.inf, 0)
        self.costs = _NOT_ESTIMATED
        self.deepest: int | None = None
        self.least_ms = 0.0
        self.estimated_at_ms = -math.inf


class PendingQueue:
    """Queued requests by key, lowest first, and how many share their deepest cached block."""

    def __init__(self) -> None:
        self._items: list[Queued] = []
        self._by_id: dict[str, Queued] = {}
        self._families: dict[int, dict[str, Queued]] = {}  # first block → its requests, by id
        self._sharing: Counter[int] = Counter()
        self._arrivals = 0
        self._work_ms = 0.0

    def __len__(self) -> int:
        return len(self._items)

    @property
    def work_ms(self) -> float:
        """Least prefill of all requests together, each as it was estimated last: a prefix that several share is no more
        work for the rest once the first of them was sent."""
        return self._work_ms if self._items else 0.0

    def all(self) -> Sequence[Queued]:
        """Every one, in order; the line may change while they are gone through."""
        return list(self._items)

    def holds(self, request_id: str) -> bool:
        """Whether the request is in the line."""
        return request_id in self._by_id

    def insert(self, item: Queued, *, key: float) -> None:
        """Puts a request in its place. key: when it is due."""
        self._arrivals += 1
        item.order = (key, self._arrivals)
        insort(self._items, item, key=_ORDER)
        request_id = item.waiting.request.request_id
        self._by_id[request_id] = item
        if len(item.blocks):
            self._families.setdefault(item.blocks[0], {})[request_id] = item
        self._work_ms += item.least_ms
        if item.deepest is not None:
            self._sharing[item.deepest] += 1

    def remove(self, request_id: str) -> None:
        """Takes a request out. Raises: KeyError if it is not in the line."""
        item = self._by_id.pop(request_id)
        del self._items[bisect_left(self._items, item.order, key=_ORDER)]
        self._work_ms -= item.least_ms
        self._forget_sharing(item)
        if len(item.blocks):
            family = self._families[item.blocks[0]]
            del family[request_id]
            if not family:
                del self._families[item.blocks[0]]

    def set_deepest(self, item: Queued, block: int | None) -> None:
        """Another block of the request is the deepest that is cached."""
        if block == item.deepest:
            return
        is_pending = item.waiting.request.request_id in self._by_id
        if is_pending:
            self._forget_sharing(item)
        item.deepest = block
        if is_pending and block is not None:
            self._sharing[block] += 1

    def set_least(self, item: Queued, least_ms: float) -> None:
        """Its least prefill is another one."""
        if item.waiting.request.request_id in self._by_id:
            self._work_ms += least_ms - item.least_ms
        item.least_ms = least_ms

    def sharing(self, item: Queued) -> int:
        """n: requests in the line with the same deepest cached block, itself included; 1 without any."""
        return 1 if item.deepest is None else self._sharing[item.deepest]

    def outdate(self, depth: int, prefix: Sequence[int]) -> None:
        """Who may hold the prefix changed: requests that share its block at this depth are estimated again at the next
        plan. A block's hash stands for all before it, so they are among those with the same first block."""
        block = prefix[depth]
        for item in self._families.get(prefix[0], {}).values():
            blocks = item.blocks
            if len(blocks) > depth and blocks[depth] == block:
                item.estimated_at_ms = -math.inf

    def outdated(self) -> Sequence[Queued]:
        """Those that have to be estimated again."""
        return [item for item in self._items if item.estimated_at_ms == -math.inf]

    def outdate_all(self) -> None:
        """The workers changed."""
        for item in self._items:
            item.estimated_at_ms = -math.inf

    def _forget_sharing(self, item: Queued) -> None:
        block = item.deepest
        if block is not None:
            self._sharing[block] -= 1
            if not self._sharing[block]:
                del self._sharing[block]
