"""The victim rule that learns: the leaves with the lowest Gittins indices among some drawn at random."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from kvrouting_core.eviction.adaptive import gittins, hazards
from kvrouting_core.eviction.adaptive.block_records import BlockRecord
from kvrouting_core.eviction.adaptive.leaf_pool import LeafPool
from kvrouting_core.eviction.adaptive.monitor import Monitor
from kvrouting_core.eviction.adaptive.ring import Ring
from kvrouting_core.eviction.adaptive.victim_rule import Visit

CANDIDATES = 64
VICTIMS = 2
"""Of a sample of so many leaves so many go, the second one if it is asked for before ages have changed noticeably."""
NEW_TOKENS_STEPS = (2048, 8192, 32768)
COLD, BRANCH, CONTINUATION = 0, 1, 2


def _hit_labels(shared: int) -> bytes:
    """Old label → label after a hit, for given lower six bits."""
    return bytes(min(3, (label >> 6) + 1) << 6 | shared for label in range(256))


_AFTER_HIT = [_hit_labels(shared) for shared in range(64)]


class LearnedRule:
    """Labels: two bits each for hits so far (0..3), how the request went on from what was cached (cold, branch,
    continuation), how much was new to it, and where in it the block lies.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._now = 0
        self._ring = Ring()
        self._requests = 0
        self._units = 0.0
        self._capacity = 1
        self._rebuilt = 0
        self._reserve: list[tuple[BlockRecord, int]] = []
        self._reserve_of: LeafPool | None = None
        self._reserved_at = 0
        self.sized(1)

    @property
    def now(self) -> int:
        """Blocks accessed so far."""
        return self._now

    @property
    def memory_entries(self) -> int:
        """Names remembered beyond those in the cache."""
        return len(self._ring) + len(self._monitor)

    def sized(self, capacity: int) -> None:
        self._capacity = capacity
        self._monitor = Monitor(capacity)
        self._grid = gittins.AgeGrid(self._monitor.ages, capacity)
        self._sampled = 0.0
        self._rebuild_tables(clump=1.0)

    def admitted(self, visit: Visit) -> bytes:
        self._requests += 1
        self._units += len(visit.names)
        return self._accessed(visit, len(visit.names))

    def extended(self, visit: Visit) -> bytes:
        known = visit.hit
        self._now += len(visit.names) - known
        shared = self._shared_bits(visit)
        return self._labels_of_new(visit, known, shared)

    def evicted(self, name: int, label: int, *, memory: int) -> None:
        self._ring.put(name, label, memory=memory)

    def pick(self, pool: LeafPool) -> BlockRecord:
        reserve = self._reserve
        if pool is self._reserve_of and self._now - self._reserved_at <= self._grid.quantum:
            while reserve:
                leaf, accessed = reserve.pop()
                if leaf.accessed == accessed and pool.has(leaf):
                    return leaf
        return self._lowest_of_sample(pool)

    def _lowest_of_sample(self, pool: LeafPool) -> BlockRecord:
        """Draws leaves at equal distances round the pool, from a random one on; keeps the next lowest in reserve.

        All leaves are equally likely to be drawn, and none twice.
        """
        count = len(pool.leaves)
        first, stride = 0, 1
        if count > CANDIDATES:
            uniform = self._rng.random
            first, stride = int(uniform() * count), 1 + int(uniform() * (count // CANDIDATES))
        accessed, labels = pool.every(stride, first, min(count, CANDIDATES))
        now, tables, steps, quantum = self._now + 1, self._tables, self._grid.steps, self._grid.quantum_bits
        drawn = zip(accessed, labels, strict=True)
        try:
            indices = [tables[label][steps[now - then >> quantum]] for then, label in drawn]
        except IndexError:  # no table yet, or an age beyond the grid
            indices = [self._index(label, now - then) for then, label in zip(accessed, labels, strict=True)]
        lowest = []
        for _ in range(min(VICTIMS, len(indices))):
            pool_index = indices.index(min(indices))
            indices[pool_index] = math.inf
            lowest.append((pool.leaves[(first + stride * pool_index) % count], accessed[pool_index]))
        self._reserve, self._reserve_of, self._reserved_at = lowest[:0:-1], pool, self._now
        return lowest[0][0]

    def index_of(self, leaf: BlockRecord) -> float:
        """What keeping the leaf's tail promises, in uses per block accessed."""
        return self._index(leaf.tail_label, self._now + 1 - leaf.accessed)

    def _index(self, label: int, age: int) -> float:
        if not self._tables[label]:
            self._tables[label] = self._table_of(label)
        return self._tables[label][self._grid.step_of(age)]

    def clear(self) -> None:
        self._ring.clear()
        self._monitor.clear()
        self._reserve, self._reserve_of = [], None

    # ---- labels --------------------------------------------------------------------------------------------------

    def _accessed(self, visit: Visit, count: int) -> bytes:
        self._now += count
        shared = self._shared_bits(visit)
        self._relabel(visit.records, shared)
        known = self._known(visit)
        labels = self._labels_of_new(visit, known, shared)
        self._watch(visit, labels, shared)
        self._rebuild_if_due()
        return labels

    def _shared_bits(self, visit: Visit) -> int:
        """What a request's blocks have in common: how it went on, and how much was new."""
        count, hit = len(visit.names), visit.hit
        if hit == 0 or 8 * hit < count:
            way = COLD
        else:
            last = visit.records[-1] if visit.records else None
            way = BRANCH if last is not None and last.had_child else CONTINUATION
            if way == BRANCH and last is not None and hit < count:
                last.branched = True
        new_tokens = (count - hit) * visit.block_tokens
        return way << 4 | sum(new_tokens >= step for step in NEW_TOKENS_STEPS) << 2

    def _relabel(self, records: Sequence[BlockRecord], shared: int) -> None:
        branching = max((pool_index for pool_index, record in enumerate(records) if record.branched), default=-1)
        for pool_index, record in enumerate(records):
            record.relabel(_AFTER_HIT[shared | (pool_index <= branching)])

    def _known(self, visit: Visit) -> int:
        """Leading blocks that are cached, or were lately."""
        names, known = visit.names, visit.hit
        while known < len(names) and (names[known] in self._ring or names[known] in visit.in_ghost):
            known += 1
        return known

    def _labels_of_new(self, visit: Visit, known: int, shared: int) -> bytes:
        names, hit = visit.names, visit.hit
        new = len(names) - hit
        labels = bytearray()
        for pool_index in range(hit, len(names)):
            hits = 0
            remembered = self._ring.take(names[pool_index])
            if pool_index < known:
                hits = min(3, (0 if remembered is None else remembered >> 6) + 1)
            labels.append(hits << 6 | shared | 4 * (pool_index - hit) // new)
        return bytes(labels)

    def _watch(self, visit: Visit, labels: bytes, shared: int) -> None:
        """Tells the monitor of the sampled names of the path."""
        monitor, mask, hit = self._monitor, self._monitor.mask, visit.hit
        boundary = self._boundary(visit)
        for pool_index in [pool_index for pool_index, name in enumerate(visit.names) if not name & mask]:
            name = visit.names[pool_index]
            self._sampled += 1
            if pool_index >= hit:
                label = labels[pool_index - hit]
            else:
                before = monitor.label_of(name)
                label = _AFTER_HIT[shared | (pool_index < boundary)][before or 0]
            monitor.used(name, label, now=self._now)

    def _boundary(self, visit: Visit) -> int:
        """Blocks of the cached part at or above the path's last branching node."""
        for record in reversed(visit.records):
            if record.branched:
                return record.end // visit.block_pages
        return 0

    # ---- tables --------------------------------------------------------------------------------------------------

    def _rebuild_if_due(self) -> None:
        mean_path = self._units / self._requests
        if self._now - self._rebuilt < max(self._capacity / 4, 16 * mean_path):
            return
        self._monitor.settle(now=self._now)
        self._rebuild_tables(clump=max(1.0, self._sampled / self._requests))
        half_life = max(8 * self._capacity, 1000 * mean_path)
        self._monitor.fade(0.5 ** ((self._now - self._rebuilt) / half_life))
        self._rebuilt = self._now

    def _rebuild_tables(self, *, clump: float) -> None:
        self._hazards = hazards.estimate(self._monitor.counts, self._monitor.ages, clump=clump)
        self._tables: list[list[float]] = [[]] * 256

    def _table_of(self, label: int) -> list[float]:
        """The index of a class at the ages of the grid."""
        found = self._hazards
        rates = next(found[key] for level in (3, 2, 1, 0) if (key := hazards.key_of(label, level)) in found)
        return self._grid.between(gittins.index_at_edges(rates, self._monitor.ages))
