"""ARC (Megiddo and Modha, FAST 2003) as a victim rule on the tree: a baseline for blocks of one page.

Pages seen once (T1) and again (T2), the names last evicted of each (B1, B2), and a target size of T1 that a miss on B1
raises and a miss on B2 lowers. On a tree only leaves can go, so the list to take from gives its least recently used
leaf, out of a sample as Redis does it, or the other list does if the sample has none of the first.
"""

from __future__ import annotations

import random
from collections import OrderedDict

from kvrouting_core.eviction import GuardedEviction
from kvrouting_core.eviction.adaptive import BlockRecord, GuaranteeParameters, LeafPool, Visit

SAMPLE = 64
SEEN_ONCE, SEEN_AGAIN = 0, 1
_AGAIN = bytes([SEEN_AGAIN]) * 256


class ArcRule:
    """Labels: SEEN_ONCE or SEEN_AGAIN."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._now = 0
        self._sizes = [0, 0]
        self._remembered: tuple[OrderedDict[int, None], OrderedDict[int, None]] = (OrderedDict(), OrderedDict())
        self._target = 0.0
        self._capacity = 1

    @property
    def now(self) -> int:
        """Blocks accessed so far."""
        return self._now

    def sized(self, capacity: int) -> None:
        self._capacity = capacity

    def admitted(self, visit: Visit) -> bytes:
        self._now += len(visit.names)
        for record in visit.records:
            moved = record.labels.count(SEEN_ONCE)
            self._sizes[SEEN_ONCE] -= moved
            self._sizes[SEEN_AGAIN] += moved
            record.relabel(_AGAIN)
        return bytes(self._label_of_miss(name) for name in visit.names[visit.hit :])

    def extended(self, visit: Visit) -> bytes:
        return self.admitted(visit)

    def evicted(self, name: int, label: int, *, memory: int) -> None:  # noqa: ARG002 - ARC has bounds of its own
        self._sizes[label] -= 1
        self._remembered[label][name] = None
        for list_number, limit in ((SEEN_ONCE, self._capacity - self._sizes[SEEN_ONCE]), (SEEN_AGAIN, self._capacity)):
            while len(self._remembered[list_number]) > max(0, limit):
                self._remembered[list_number].popitem(last=False)

    def pick(self, pool: LeafPool) -> BlockRecord:
        leaves = pool.leaves
        count = len(leaves)
        if count > SAMPLE:
            leaves = [leaves[int(self._rng.random() * count)] for _ in range(SAMPLE)]
        wanted = SEEN_ONCE if self._sizes[SEEN_ONCE] > self._target else SEEN_AGAIN
        return min(leaves, key=lambda leaf: (leaf.tail_label != wanted, leaf.accessed))

    def clear(self) -> None:
        self._sizes = [0, 0]
        for names in self._remembered:
            names.clear()

    def _label_of_miss(self, name: int) -> int:
        once, again = (len(names) for names in self._remembered)
        label = SEEN_AGAIN
        if name in self._remembered[SEEN_ONCE]:
            self._target = min(float(self._capacity), self._target + max(1.0, again / once))
            del self._remembered[SEEN_ONCE][name]
        elif name in self._remembered[SEEN_AGAIN]:
            self._target = max(0.0, self._target - max(1.0, once / again))
            del self._remembered[SEEN_AGAIN][name]
        else:
            label = SEEN_ONCE
        self._sizes[label] += 1
        return label


def arc_on_the_tree(rng: random.Random) -> GuardedEviction:
    """ARC without any guarantee: the debt that would end its freedom is out of reach."""
    return GuardedEviction(ArcRule(rng), random.Random(rng.getrandbits(64)), guarantee=GuaranteeParameters(beta=1e12))
