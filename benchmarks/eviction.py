"""CPU time of eviction per token, against policies that look at the whole tree in each call.

One process, one interleaved run: each round evicts 64 tokens from every cache in turn, then refills them, untimed.
The mean is that of the rounds without the lowest and the highest tenth: every other choice of rlt-adaptive has its
sample from the one before, so there is no typical round.
`python -m benchmarks.eviction [--quick]`
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import random
import statistics
import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from kvrouting_core.eviction import EvictionPolicy, LeafLRU, RandomizedLeafTokens, make_policy
from kvrouting_core.eviction.base import ExposeParent
from kvrouting_core.eviction.rlt import MarkedRecord
from kvrouting_core.eviction.whole_leaves import HistoryRecord
from kvrouting_core.radix_cache import CacheNode, RadixCache

CALL_TOKENS = 64
TAILS_PER_TRUNK = 32


@dataclass(frozen=True, slots=True)
class Shape:
    """Of the tree: tails of equal length under trunks of equal length."""

    page_size: int
    trunk_tokens: int
    tail_tokens: int


SHORT = Shape(page_size=1, trunk_tokens=32, tail_tokens=16)
LONG = (Shape(page_size=1, trunk_tokens=256, tail_tokens=128), Shape(page_size=64, trunk_tokens=256, tail_tokens=128))


class WalkingRLT(RandomizedLeafTokens):
    """Baseline: the paper's algorithm as its code has it: each call walks the tree for the unmarked leaves."""

    anchor: CacheNode

    def record(self, owner: Any, pages: int) -> MarkedRecord:
        self.anchor = owner
        return super().record(owner, pages)

    def choose(self, pages: int, expose_parent: ExposeParent) -> list[tuple[MarkedRecord, int]]:
        taken: dict[MarkedRecord, int] = {}
        leaves = [node.record for node in _leaves(self.anchor)]
        unmarked = [record for record in leaves if record.mark != self.phase]
        for _ in range(pages):
            if not unmarked:
                self._start_phase()
                unmarked = [record for record in leaves if taken.get(record, 0) < record.pages]
            place = int(self._rng.random() * len(unmarked))
            record = unmarked[place]
            taken[record] = taken.get(record, 0) + 1
            if taken[record] == record.pages:
                unmarked[place] = unmarked[-1]
                unmarked.pop()
                self.pinned(record)
                parent = expose_parent(record)
                if parent is not None:
                    self.evictable(parent)
                    unmarked.append(parent)
        return list(taken.items())


class RebuildingLRU(LeafLRU):
    """Baseline: Leaf-LRU as SGLang's Python tree has it: each call builds a heap of all leaves."""

    anchor: CacheNode

    def record(self, owner: Any, pages: int) -> HistoryRecord:
        self.anchor = owner
        return super().record(owner, pages)

    def choose(self, pages: int, expose_parent: ExposeParent) -> list[tuple[HistoryRecord, int]]:
        ties = itertools.count()
        heap = [(self.priority(node.record), next(ties), node.record) for node in _leaves(self.anchor)]
        heapq.heapify(heap)
        victims: list[tuple[HistoryRecord, int]] = []
        while pages > 0 and heap:
            record = heapq.heappop(heap)[2]
            self.pinned(record)
            victims.append((record, record.pages))
            pages -= record.pages
            parent = expose_parent(record)
            if parent is not None:
                self.evictable(parent)
                heapq.heappush(heap, (self.priority(parent), next(ties), parent))
        return victims


def _leaves(anchor: CacheNode) -> Iterator[CacheNode]:
    """The unlocked leaves of the tree that the node belongs to."""
    root = anchor
    while root.parent is not None:
        root = root.parent
    pending = [root]
    while pending:
        node = pending.pop()
        if node.children:
            pending.extend(node.children.values())
        elif node.locks == 0:
            yield node


CONTENDERS: dict[str, Callable[[], EvictionPolicy[Any]]] = {
    "RLT": lambda: RandomizedLeafTokens(random.Random(1)),
    "rlt-adaptive": lambda: make_policy("rlt-adaptive", random.Random(1)),
    "RLT, walk per call": lambda: WalkingRLT(random.Random(1)),
    "Leaf-LRU": LeafLRU,
    "Leaf-LRU, heap per call": RebuildingLRU,
}
WITHOUT_WALKS = ("RLT", "rlt-adaptive", "Leaf-LRU")


@dataclass(slots=True)
class Contender:
    """A full cache, the paths that keep it full, and the time that its evictions took per token, one per round."""

    cache: RadixCache
    paths: Iterator[array[int]]
    path_tokens: int
    us_per_token: list[float]

    def evict(self) -> None:
        start = time.process_time_ns()
        freed = self.cache.evict(CALL_TOKENS)
        self.us_per_token.append((time.process_time_ns() - start) / 1000 / freed)

    def refill(self) -> None:
        while self.cache.free_tokens >= self.path_tokens:
            self.cache.serve(next(self.paths))


def _paths(leaves: int, shape: Shape) -> Iterator[array[int]]:
    """New tails for ever, each under one of leaves / 32 trunks."""
    rng = random.Random(2)
    trunks = max(1, leaves // TAILS_PER_TRUNK)
    for tail in itertools.count(trunks):
        trunk = int(rng.random() * trunks)
        yield array("I", [trunk] * shape.trunk_tokens + [tail % 2**32] * shape.tail_tokens)


def _contender(policy: EvictionPolicy[Any], leaves: int, shape: Shape) -> Contender:
    capacity = leaves * shape.tail_tokens + leaves // TAILS_PER_TRUNK * shape.trunk_tokens
    cache = RadixCache(capacity_tokens=capacity, page_size=shape.page_size, policy=policy)
    contender = Contender(cache, _paths(leaves, shape), shape.trunk_tokens + shape.tail_tokens, [])
    contender.refill()
    return contender


def _measure(leaves: int, rounds: int, shape: Shape, names: Iterable[str]) -> dict[str, float]:
    """Mean µs per evicted token of each contender, without the tenths at both ends."""
    contenders = {name: _contender(CONTENDERS[name](), leaves, shape) for name in names}
    for _ in range(rounds):
        for contender in contenders.values():
            contender.evict()
        for contender in contenders.values():
            contender.refill()
    return {name: _middle_mean(contender.us_per_token) for name, contender in contenders.items()}


def _middle_mean(values: list[float]) -> float:
    margin = len(values) // 10
    return statistics.fmean(sorted(values)[margin : len(values) - margin])


def run(*, quick: bool = False) -> None:
    """Prints the table."""
    print(f"CPU µs per evicted token, {CALL_TOKENS} tokens a call, page 1 (times RLT's in the same run)")
    print(f"{'leaves':>8} " + " ".join(f"{name:>25}" for name in CONTENDERS))
    for leaves in (1_000, 10_000) if quick else (1_000, 10_000, 100_000):
        us = _measure(leaves, 10 if quick else 40, SHORT, CONTENDERS)
        cells = (f"{us[name]:.2f} ({us[name] / us['RLT']:.1f}x)" for name in CONTENDERS)
        print(f"{leaves:>8} " + " ".join(f"{cell:>25}" for cell in cells), flush=True)
    for shape in LONG:
        print(f"tails of {shape.tail_tokens} tokens, page {shape.page_size}: µs a token, a {CALL_TOKENS} (times RLT's)")
        print(f"{'leaves':>8} " + " ".join(f"{name:>25}" for name in WITHOUT_WALKS))
        for leaves in (500, 5_000) if quick else (1_000, 10_000, 50_000):
            us = _measure(leaves, 20 if quick else 100, shape, WITHOUT_WALKS)
            cells = (
                f"{us[name]:.2f}, {us[name] * CALL_TOKENS:.0f} ({us[name] / us['RLT']:.1f}x)" for name in WITHOUT_WALKS
            )
            print(f"{leaves:>8} " + " ".join(f"{cell:>25}" for cell in cells), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two small sizes, seconds")
    run(quick=parser.parse_args().quick)


if __name__ == "__main__":
    main()
