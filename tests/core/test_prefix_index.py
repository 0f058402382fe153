"""The prefix index against a dictionary of sets."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvrouting_core.identity import WorkerId
from kvrouting_core.prefix_index import PrefixIndex

WORKERS = [WorkerId(f"pod-{i}/0") for i in range(5)]
A, B, C = WORKERS[:3]


def block(number: int) -> int:
    """A well spread 64-bit hash, as the index expects them."""
    return (number + 1) * 0x9E3779B97F4A7C15 % 2**64


# A small forest: each chain has 7 blocks and shares the trunk up to its fork; two fork at the same place.
TRUNK = [block(i) for i in range(6)]
CHAINS = [
    TRUNK[:fork] + [block(100 * number + i) for i in range(7 - fork)] for number, fork in enumerate((0, 2, 2, 4, 6), 1)
]
ALL_BLOCKS = sorted({b for chain in CHAINS for b in chain})

chains = st.sampled_from(CHAINS)
workers = st.sampled_from(WORKERS)
some_blocks = st.lists(st.sampled_from(ALL_BLOCKS), max_size=12)


def as_input(kind: str, blocks: list[int]) -> Any:
    if kind == "numpy":
        return np.array(blocks, dtype=np.uint64)
    return array("Q", blocks) if kind == "array" else blocks


def leading(held: set[int], chain: list[int]) -> int:
    depth = 0
    while depth < len(chain) and chain[depth] in held:
        depth += 1
    return depth


class IndexAgainstSets(RuleBasedStateMachine):
    """Any sequence of updates, prefix-closed or not."""

    @initialize()
    def start(self) -> None:
        self.index = PrefixIndex()
        self.held: dict[WorkerId, set[int]] = {}
        self.staged: dict[WorkerId, set[int]] = {}

    @rule(worker=workers, blocks=some_blocks, kind=st.sampled_from(["list", "numpy", "array"]))
    def add(self, worker: WorkerId, blocks: list[int], kind: str) -> None:
        held = self.held.setdefault(worker, set())
        fresh = len(set(blocks) - held)
        held.update(blocks)
        assert self.index.add(worker, as_input(kind, blocks)) == fresh

    @rule(worker=workers, chain=chains, depth=st.integers(0, 7))
    def add_chain(self, worker: WorkerId, chain: list[int], depth: int) -> None:
        self.add(worker, chain[:depth], "list")

    @rule(worker=workers, blocks=some_blocks, kind=st.sampled_from(["list", "numpy", "array"]))
    def remove(self, worker: WorkerId, blocks: list[int], kind: str) -> None:
        held = self.held.get(worker, set())
        gone = len(held & set(blocks))
        held.difference_update(blocks)
        assert self.index.remove(worker, as_input(kind, blocks)) == gone

    @rule(worker=workers)
    def drop(self, worker: WorkerId) -> None:
        self.held.pop(worker, None)
        self.staged.pop(worker, None)
        self.index.drop(worker)

    @rule(worker=workers)
    def clear(self, worker: WorkerId) -> None:
        if worker in self.held:
            self.held[worker] = set()
            self.staged.pop(worker, None)
        self.index.clear(worker)

    @rule(worker=workers, blocks=some_blocks)
    def swap(self, worker: WorkerId, blocks: list[int]) -> None:
        self.held[worker] = set(blocks)
        self.staged.pop(worker, None)
        self.index.swap(worker, blocks)

    @rule(worker=workers)
    def begin_snapshot(self, worker: WorkerId) -> None:
        self.staged[worker] = set()
        self.index.begin_snapshot(worker)

    @rule(worker=workers, blocks=some_blocks)
    def add_to_snapshot(self, worker: WorkerId, blocks: list[int]) -> None:
        if worker in self.staged:
            self.staged[worker].update(blocks)
            self.index.add_to_snapshot(worker, blocks)

    @rule(worker=workers)
    def commit_snapshot(self, worker: WorkerId) -> None:
        if worker in self.staged:
            self.held[worker] = self.staged.pop(worker)
            self.index.commit_snapshot(worker)

    @rule(worker=workers)
    def abandon_snapshot(self, worker: WorkerId) -> None:
        self.staged.pop(worker, None)
        self.index.abandon_snapshot(worker)

    @rule(max_blocks=st.integers(1, 600))
    def sweep_a_part(self, max_blocks: int) -> None:
        self.index.sweep(max_blocks)

    @rule()
    def after_a_full_sweep_only_what_is_held_remains(self) -> None:
        assert self.index.sweep() is False
        owners = [*self.held.values(), *self.staged.values()]
        assert len(self.index) == len(set().union(*owners))
        for worker, held in self.held.items():
            others = [s for w, s in self.held.items() if w != worker] + list(self.staged.values())
            assert self.index.unique_blocks(worker) == len(held - set().union(*others))

    @rule(worker=workers, asked=st.sampled_from(ALL_BLOCKS))
    def one_block_is_held_or_not(self, worker: WorkerId, asked: int) -> None:
        assert self.index.holds(worker, asked) is (asked in self.held.get(worker, set()))

    @rule(chain=chains, length=st.integers(0, 7))
    def walk_and_audit_follow_the_definition(self, chain: list[int], length: int) -> None:
        prompt = chain[:length]
        expected = {w: leading(held, prompt) for w, held in self.held.items() if leading(held, prompt)}
        assert self.index.walk(prompt) == expected
        matched = self.index.match(prompt)
        assert self.index.audit(prompt) == {
            w: (matched.get(w, 0), expected.get(w, 0)) for w in self.held if matched.get(w, 0) != expected.get(w, 0)
        }

    @rule(chain=chains, length=st.integers(0, 7))
    def match_equals_the_walk_where_views_are_prefix_closed(self, chain: list[int], length: int) -> None:
        prompt = chain[:length]
        matched = self.index.match(np.array(prompt, dtype=np.uint64))
        for worker, held in self.held.items():
            if held.isdisjoint(prompt[leading(held, prompt) :]):
                assert matched.get(worker, 0) == leading(held, prompt)
        assert matched.keys() <= self.held.keys()

    @invariant()
    def counts_and_digests_are_those_of_the_sets(self) -> None:
        assert self.index.workers() == frozenset(self.held)
        for worker in WORKERS:
            held = self.held.get(worker, set())
            assert self.index.count(worker) == len(held)
            assert self.index.digest(worker) == sum(held) % 2**64


TestIndexAgainstSets = IndexAgainstSets.TestCase
TestIndexAgainstSets.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@settings(deadline=None)
@given(st.lists(st.tuples(workers, st.integers(0, 300)), max_size=30))
def test_bisection_finds_every_depth_of_a_long_prompt(depths: list[tuple[WorkerId, int]]) -> None:
    prompt = [block(i) for i in range(300)]
    index = PrefixIndex()
    deepest: dict[WorkerId, int] = {}
    for worker, depth in depths:
        index.add(worker, prompt[:depth])
        deepest[worker] = max(deepest.get(worker, 0), depth)
    assert index.match(prompt) == {w: d for w, d in deepest.items() if d}
    assert not index.audit(prompt)


def test_an_empty_prompt_matches_nobody() -> None:
    index = PrefixIndex()
    index.add(A, TRUNK)
    assert index.match([]) == index.walk([]) == {}


def test_a_hole_in_a_view_is_found_by_the_audit() -> None:
    index = PrefixIndex()
    index.add(A, TRUNK)
    index.add(B, TRUNK)
    index.remove(A, TRUNK[1:2])
    assert index.audit(TRUNK) == {A: (6, 1)}


def test_the_old_view_answers_until_the_snapshot_is_complete() -> None:
    index = PrefixIndex()
    index.add(A, TRUNK[:2])
    index.begin_snapshot(A)
    index.add_to_snapshot(A, TRUNK[:4])
    index.add(A, TRUNK[:3])
    assert index.match(TRUNK) == {A: 3}
    index.add_to_snapshot(A, TRUNK[4:])
    index.commit_snapshot(A)
    assert index.match(TRUNK) == {A: 6}
    assert (index.count(A), index.digest(A)) == (6, sum(TRUNK) % 2**64)


def test_a_chunk_without_a_begun_snapshot_is_an_error() -> None:
    with pytest.raises(KeyError):
        PrefixIndex().add_to_snapshot(A, TRUNK)
    with pytest.raises(KeyError):
        PrefixIndex().commit_snapshot(A)


def test_a_dropped_worker_is_gone_at_once_and_its_blocks_are_swept_by_later_updates() -> None:
    index = PrefixIndex()
    many = [block(i) for i in range(20_000)]
    index.add(A, many)
    index.add(B, many[:5])
    index.drop(A)
    assert index.match(many) == {B: 5}
    assert index.count(A) == index.digest(A) == 0
    assert len(index) == 20_000
    for _ in range(20_000):
        if index.sweep(1) is False:
            break
        index.add(B, [])
    assert len(index) == 5
    assert index.unique_blocks(B) == 5


def test_slots_of_dropped_workers_are_used_again() -> None:
    """Masks must not grow with the number of workers that ever were."""
    index = PrefixIndex()
    for generation in range(200):
        for i in range(3):
            index.swap(WorkerId(f"pod-{generation}-{i}/0"), TRUNK)
        for i in range(3):
            index.drop(WorkerId(f"pod-{generation}-{i}/0"))
    assert index.mask_bits <= 8
    index.swap(C, TRUNK)
    assert index.match(TRUNK) == {C: 6}


def test_a_worker_returns_with_nothing_of_its_former_view() -> None:
    index = PrefixIndex()
    index.add(A, TRUNK)
    index.drop(A)
    index.add(A, TRUNK[:1])
    assert index.match(TRUNK) == {A: 1}
