"""The policies against theory, against the optimum by its definition, and against known hit rates."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from array import array
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrouting_core.eviction import (
    POLICIES,
    EvictionPolicy,
    LeafLRU,
    Optimum,
    PathAccess,
    RandomizedLeafTokens,
    SegmentedLRU,
    make_policy,
)
from kvrouting_core.eviction.lazy_heap import LazyHeap, QueuedRecord
from kvrouting_core.radix_cache import RadixCache

Request = tuple[Hashable, Sequence[int]]


def adversary(capacity: int, shortest: int) -> list[array[int]]:
    """B − L + 2 paths that share L − 1 tokens and differ in the last one."""
    shared = array("I", range(shortest - 1))
    return [shared + array("I", [10_000 + path]) for path in range(capacity - shortest + 2)]


def test_leaf_lru_misses_every_time_on_the_adversarys_cycle() -> None:
    capacity, shortest = 1100, 100
    kv = RadixCache(capacity_tokens=capacity, policy=LeafLRU())
    paths = adversary(capacity, shortest)
    for path in paths:
        kv.serve(path)
    hits = [kv.serve(path) for _ in range(3) for path in paths]
    assert set(hits) == {shortest - 1}


def test_rlt_misses_a_harmonic_number_of_times_per_phase_on_the_adversary() -> None:
    capacity, shortest, phases = 1100, 100, 30
    bound = 1.1 * sum(1 / i for i in range(1, capacity - shortest + 2)) + 2
    per_phase: list[float] = []
    for seed in range(2):
        policy = RandomizedLeafTokens(random.Random(seed))
        kv = RadixCache(capacity_tokens=capacity, policy=policy)
        paths, rng = adversary(capacity, shortest), random.Random(100 + seed)
        for path in paths:
            kv.serve(path)
        first, misses = policy.phase, 0
        while policy.phase < first + phases // 2:
            misses += kv.serve(paths[int(rng.random() * len(paths))]) < shortest
        per_phase.append(misses / (phases // 2))
    assert sum(per_phase) / len(per_phase) <= bound


def optimal_hits(requests: Sequence[Request], capacity_pages: int, page_size: int) -> list[int]:
    """Hit pages per request when the leaf page with the furthest next use is evicted, found by looking at all pages."""
    paths = [
        [(namespace, tuple(tokens[:end])) for end in range(page_size, len(tokens) + 1, page_size)]
        for namespace, tokens in requests
    ]
    cached: set[tuple[Hashable, tuple[int, ...]]] = set()
    hits: list[int] = []

    def next_use(page: tuple[Hashable, tuple[int, ...]], now: int) -> int:
        return next((i for i in range(now + 1, len(paths)) if page in paths[i]), len(paths))

    for now, path in enumerate(paths):
        hits.append(sum(page in cached for page in path))
        while len(cached | set(path)) > capacity_pages:
            parents = {(space, tokens[:-page_size]) for space, tokens in cached}
            leaves = sorted(cached - parents - set(path), key=repr)
            cached.remove(max(leaves, key=lambda page: next_use(page, now)))
        cached |= set(path)
    return hits


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    data=st.lists(
        st.tuples(st.sampled_from(["", "x"]), st.lists(st.integers(0, 2), min_size=1, max_size=5)), max_size=20
    ),
    capacity_pages=st.integers(5, 9),
    page_size=st.sampled_from([1, 3, 64]),
)
def test_the_optimum_hits_what_its_definition_hits(
    data: list[tuple[str, list[int]]], capacity_pages: int, page_size: int
) -> None:
    requests: list[Request] = [(space, [token for token in pages for _ in range(page_size)]) for space, pages in data]
    kv = RadixCache(
        capacity_tokens=capacity_pages * page_size,
        page_size=page_size,
        policy=Optimum(requests, page_size=page_size),
    )
    hits = [kv.serve(tokens, space) // page_size for space, tokens in requests]
    assert hits == optimal_hits(requests, capacity_pages, page_size)


def test_the_optimum_refuses_a_request_that_was_not_announced() -> None:
    kv = RadixCache(capacity_tokens=10, policy=Optimum([("", [1, 2]), ("", [1, 3])], page_size=1))
    kv.serve([1, 2])
    with pytest.raises(ValueError, match="admission 1 is not request 1"):
        kv.lock([1, 2])


def test_the_optimum_evicts_an_unannounced_answer_first() -> None:
    kv = RadixCache(capacity_tokens=3, policy=Optimum([("", [1]), ("", [2]), ("", [1])], page_size=1))
    lock = kv.lock([1])
    kv.insert(lock, [1, 8, 9])
    kv.unlock(lock)
    kv.serve([2])
    assert kv.match([1, 8, 9]).tokens == 2


def generated_shared_prefix(seed: int) -> list[list[array[int]]]:
    """GSP: 128 groups of 32 prompts, totals of 512 to 8192 tokens, half of them shared within the group."""
    rng = random.Random(seed)

    def tokens(count: int) -> array[int]:
        return array("I", rng.randbytes(4 * count))

    groups: list[list[array[int]]] = []
    for group in range(128):
        total = (512, 1024, 2048, 4096, 8192)[group % 5]
        shared = tokens(total // 2)
        groups.append([shared + tokens(total - total // 2) for _ in range(32)])
    return groups


def hit_rate(prompts: list[array[int]], capacity: int, policy: EvictionPolicy[Any]) -> float:
    kv = RadixCache(capacity_tokens=capacity, page_size=64, policy=policy)
    return sum(map(kv.serve, prompts)) / sum(map(len, prompts))


def hit_rates(prompts: list[array[int]], capacity: int) -> dict[str, float]:
    rates = {
        name: hit_rate(prompts, capacity, make_policy(name, random.Random(3)))
        for name in ("lru", "rlt", "random", "slru")
    }
    future = Optimum([("", prompt) for prompt in prompts], page_size=64)
    return {**rates, "opt": hit_rate(prompts, capacity, future)}


def test_gsp_in_random_order_gives_the_known_hit_rates() -> None:
    prompts = [prompt for group in generated_shared_prefix(1) for prompt in group]
    random.Random(7).shuffle(prompts)
    known = {"lru": 0.208, "rlt": 0.236, "random": 0.293, "slru": 0.406, "opt": 0.481}
    assert hit_rates(prompts, 197_000) == pytest.approx(known, abs=0.02)


def test_gsp_in_round_robin_order_gives_the_known_hit_rates() -> None:
    groups = generated_shared_prefix(1)
    prompts = [group[place] for place in range(32) for group in groups]
    known = {"lru": 0.0, "rlt": 0.215, "random": 0.355, "slru": 0.0, "opt": 0.484}
    assert hit_rates(prompts, 300_000) == pytest.approx(known, abs=0.01)


def test_slru_protects_what_a_second_request_has_found() -> None:
    kv = RadixCache(capacity_tokens=3, policy=SegmentedLRU())
    kv.serve([1])
    kv.serve([1])
    for token in (2, 3, 4, 5):
        kv.serve([token])
    assert [kv.match([token]).tokens for token in (1, 2, 3, 4, 5)] == [1, 0, 0, 1, 1]


def test_lfu_evicts_what_the_fewest_requests_have_used() -> None:
    kv = RadixCache(capacity_tokens=2, policy=make_policy("lfu", random.Random(0)))
    for token in (1, 1, 1, 2, 2):
        kv.serve([token])
    kv.serve([3])
    kv.serve([4])
    assert [kv.match([token]).tokens for token in (1, 2, 3, 4)] == [1, 0, 0, 1]


def test_whole_leaves_go_where_a_part_would_do() -> None:
    kv = RadixCache(capacity_tokens=10, policy=LeafLRU())
    kv.serve(range(10))
    assert kv.evict(1) == 10


@pytest.mark.parametrize("threshold", [0, -1])
def test_slru_refuses_a_segment_that_protects_everything(threshold: int) -> None:
    with pytest.raises(ValueError, match=str(threshold)):
        SegmentedLRU(protected_hits=threshold)


def test_an_unknown_policy_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'mru'.*rlt, lru, lfu, slru, random"):
        make_policy("mru", random.Random(0))


HISTORY = """
import random, sys
from kvrouting_core.eviction import make_policy
from kvrouting_core.radix_cache import RadixCache
kv = RadixCache(capacity_tokens=300, policy=make_policy(sys.argv[1], random.Random(5)))
rng = random.Random(6)
for _ in range(400):
    head, tail = rng.randrange(9), rng.randrange(40)
    print(kv.serve([head] * 20 + [tail] * rng.randrange(1, 30), ("a", "b")[head % 2]), end=" ")
"""


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_choices_depend_on_the_seed_and_not_on_pythons_hashes(policy: str) -> None:
    outputs = {
        subprocess.run(
            [sys.executable, "-c", HISTORY, policy],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert len(outputs) == 1
    assert len(set(outputs.pop().split())) > 5


def access(*records: Any) -> PathAccess[Any]:
    return PathAccess(namespace="", tokens=b"", pages=len(records), hit_pages=len(records), records=records)


def refuse(record: Any) -> None:
    """The leaf has a locked parent."""


def test_an_access_to_a_leaf_that_is_not_locked_marks_it_too() -> None:
    """A tree of someone else may access leaves without a lock."""
    policy = RandomizedLeafTokens(random.Random(0))
    old, accessed = policy.record("old", 2), policy.record("accessed", 2)
    policy.evictable(old)
    policy.evictable(accessed)
    policy.inserted(access(accessed))
    policy.admitted(access(accessed))
    assert policy.choose(2, refuse) == [(old, 2)]
    assert policy.choose(9, refuse) == [(accessed, 2)]
    assert policy.choose(1, refuse) == []


def test_an_admission_marks_what_it_finds() -> None:
    policy = RandomizedLeafTokens(random.Random(0))
    found, other = policy.record("found", 9), policy.record("other", 9)
    policy.admitted(access(found))
    policy.evictable(found)
    policy.evictable(other)
    assert policy.choose(9, refuse) == [(other, 9)]
    assert policy.phase == 1


def test_the_first_part_of_a_split_node_keeps_its_mark() -> None:
    """A tree of someone else may split a node without an access, then lose the rest of it."""
    policy = RandomizedLeafTokens(random.Random(0))
    node, other = policy.record("node", 5), policy.record("other", 1)
    policy.inserted(access(node))
    prefix = policy.split(node, "prefix", 3)
    assert (prefix.owner, prefix.pages, node.pages) == ("prefix", 3, 2)
    policy.evictable(prefix)
    policy.evictable(other)
    assert policy.choose(1, refuse) == [(other, 1)]


@pytest.mark.parametrize("name", ["lru", "lfu", "slru"])
def test_the_first_part_of_a_split_node_keeps_its_history(name: str) -> None:
    policy = make_policy(name, random.Random(0))
    older, node = policy.record("older", 1), policy.record("node", 5)
    policy.inserted(access(older))
    policy.inserted(access(node))
    policy.evictable(policy.split(node, "prefix", 3))
    policy.evictable(older)
    assert [record.owner for record, _ in policy.choose(4, refuse)] == ["older", "prefix"]


@pytest.mark.parametrize("make", [LeafLRU, SegmentedLRU])
def test_an_access_to_a_leaf_that_is_not_locked_moves_it_back(make: Callable[[], EvictionPolicy[Any]]) -> None:
    policy = make()
    first, second = policy.record("first", 1), policy.record("second", 1)
    for record in (first, second):
        policy.inserted(access(record))
        policy.evictable(record)
    policy.admitted(access(first))
    assert policy.choose(2, refuse) == [(second, 1), (first, 1)]


def test_an_access_cannot_hit_more_pages_than_the_path_has() -> None:
    with pytest.raises(ValueError, match=r"0\.\.1, got 2"):
        PathAccess(namespace="", tokens=b"", pages=1, hit_pages=2, records=())


def test_withdrawn_entries_do_not_pile_up() -> None:
    heap: LazyHeap[QueuedRecord] = LazyHeap()
    records = [QueuedRecord(None, 1) for _ in range(100)]
    for record in records:
        heap.push(0, record)
    for round_number in range(1, 200):
        for place, record in enumerate(records):
            heap.withdraw(record)
            heap.push((round_number * place) % 101, record)
    assert len(heap) == 100
    assert heap.slots <= 2 * len(heap) + 64
    assert [heap.pop() for _ in records] == sorted(records, key=lambda r: (199 * records.index(r)) % 101)
    assert heap.pop() is None
