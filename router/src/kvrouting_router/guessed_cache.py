"""What workers hold by the router's own guess: prompts it sent them, oldest out first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence

from kvrouting_core.identity import WorkerId
from kvrouting_core.prefix_index import PrefixIndex


class GuessedCache:
    """An index fed by decisions, with one least-recently-used order per worker.

    A chain is touched from its end to its start, so a block is always older than its prefix and what is dropped
    first is always a leaf: the set of each worker stays prefix-closed.
    """

    def __init__(self) -> None:
        self._index = PrefixIndex()
        self._order: dict[WorkerId, OrderedDict[int, None]] = {}

    def __bool__(self) -> bool:
        return bool(self._order)

    def __len__(self) -> int:
        return len(self._index)

    def served(self, worker: WorkerId, blocks: Sequence[int], *, capacity_blocks: int) -> None:
        """The worker has computed this prompt, so it is the newest it holds.

        Blocks beyond the capacity are left out, at the prompt's end.
        """
        blocks = blocks[:capacity_blocks]
        if not blocks:
            return
        order = self._order.setdefault(worker, OrderedDict())
        for block in reversed(blocks):
            order[block] = None
            order.move_to_end(block)
        self._index.add(worker, blocks)
        excess = len(order) - capacity_blocks
        if excess > 0:
            self._index.remove(worker, [order.popitem(last=False)[0] for _ in range(excess)])

    def drop(self, worker: WorkerId) -> None:
        """The worker is gone or starts anew."""
        self._order.pop(worker, None)
        self._index.drop(worker)

    def match(self, blocks: Sequence[int]) -> Mapping[WorkerId, int]:
        """Worker → leading blocks, 1..B; who holds none is absent."""
        return self._index.match(blocks)

    def count(self, worker: WorkerId) -> int:
        """Blocks of the worker."""
        return self._index.count(worker)


class PoolCache:
    """What a routing policy asks: the exact index and the guesses, whichever is longer for a worker."""

    def __init__(self, *, exact: PrefixIndex, guessed: GuessedCache) -> None:
        self._exact = exact
        self._guessed = guessed

    def match(self, blocks: Sequence[int]) -> Mapping[WorkerId, int]:
        """Worker → leading blocks held, 1..B; who holds none is absent."""
        matched = self._exact.match(blocks)
        if self._guessed:
            for worker, depth in self._guessed.match(blocks).items():
                if depth > matched.get(worker, 0):
                    matched[worker] = depth
        return matched

    def count(self, worker: WorkerId) -> int:
        """Blocks that the worker holds, exact where that is known."""
        return self._exact.count(worker) or self._guessed.count(worker)
