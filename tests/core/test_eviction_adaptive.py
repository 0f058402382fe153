"""The frame of rlt-adaptive keeps its guarantee whatever the victim rule does; its parts do what they say."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrouting_core.eviction import GuardedEviction, RandomizedLeafTokens, make_policy
from kvrouting_core.eviction.adaptive import BlockRecord, GuaranteeParameters, LearnedRule
from kvrouting_core.eviction.adaptive.ghost import GhostRLT
from kvrouting_core.eviction.adaptive.monitor import Monitor, sampling_period
from kvrouting_core.radix_cache import PathLock, RadixCache


class UpsideDown(LearnedRule):
    """The adversary: out of all leaves the one with the highest index, which is worth the most."""

    def pick(self, leaves: Sequence[BlockRecord]) -> BlockRecord:
        return max(leaves, key=self.index_of)


class MostRecent(LearnedRule):
    """Evicts what was used last: as bad as it gets on loads with locality."""

    def pick(self, leaves: Sequence[BlockRecord]) -> BlockRecord:
        return max(leaves, key=lambda leaf: leaf.accessed)


RULES = {"learned": LearnedRule, "upside down": UpsideDown, "most recent": MostRecent}


def guarded(rule: str, seed: int, **guarantee: float) -> GuardedEviction:
    return GuardedEviction(
        RULES[rule](random.Random(seed)),
        random.Random(f"ghost {seed}"),
        guarantee=GuaranteeParameters(**guarantee),  # type: ignore[arg-type]
    )


def assert_bound(policy: GuardedEviction) -> None:
    """The theorem, with p the longest path so far."""
    debt, capacity, longest = policy.debt, policy.capacity_pages, policy.longest_path_pages
    assert debt.phi <= (1 + 0.25) * capacity + longest + 1e-6
    assert debt.own_loads <= (1 + 0.02) * debt.ghost_loads + (1 + 0.25) * capacity + longest + 1e-6


def assert_pools(policy: GuardedEviction) -> None:
    """Each pool says of its leaves what their records say; E2 is what of E the ghost does not hold."""
    leaves, spare = policy._leaves, policy._fallback
    for pool in (leaves, spare):
        assert list(pool.accessed) == [leaf.accessed for leaf in pool]
        assert list(pool.labels) == [leaf.tail_label for leaf in pool]
    assert [leaf.pool_index for leaf in leaves] == list(range(len(leaves)))
    assert [leaf.fallback_index for leaf in spare] == list(range(len(spare)))
    per_block = max(1, 64 // policy._bound().site.page_tokens)
    names = {leaf: leaf.tail_name(per_block) for leaf in leaves}
    assert set(spare) == {leaf for leaf, name in names.items() if name is None or name not in policy._ghost}


class Scene:
    """A cache that requests run in side by side, and the check after every call."""

    def __init__(self, policy: GuardedEviction, *, capacity_pages: int, page_size: int) -> None:
        self.policy = policy
        self.page_size = page_size
        self.cache = RadixCache(capacity_tokens=capacity_pages * page_size, page_size=page_size, policy=policy)
        self.running: list[tuple[PathLock, array[int]]] = []

    def tokens(self, pages: Sequence[int]) -> array[int]:
        return array("I", [page for page in pages for _ in range(self.page_size)])

    def begin(self, pages: Sequence[int]) -> None:
        tokens = self.tokens(pages)
        self.running.append((self.cache.lock(tokens), tokens))
        assert_bound(self.policy)
        assert_pools(self.policy)

    def load(self, which: int, answer: Sequence[int]) -> None:
        if not self.running:
            return
        lock, tokens = self.running[which % len(self.running)]
        tokens = tokens + self.tokens(answer)
        missing = len(tokens) - self.cache.match(tokens).tokens
        if missing > self.cache.free_tokens + self.cache.evictable_tokens:
            return
        shortfall = missing - self.cache.free_tokens
        if shortfall > 0:
            freed = self.cache.evict(shortfall)
            assert (
                freed == -(-shortfall // self.page_size) * self.page_size
            )  # a victim exists while anything is unlocked
        missing = len(tokens) - self.cache.match(tokens).tokens
        if missing <= self.cache.free_tokens:
            self.cache.insert(lock, tokens)
            self.running[which % len(self.running)] = (lock, tokens)
        assert_bound(self.policy)
        assert_pools(self.policy)

    def end(self, which: int) -> None:
        if self.running:
            lock, _ = self.running.pop(which % len(self.running))
            self.cache.unlock(lock)
            assert_pools(self.policy)

    def serve(self, pages: Sequence[int]) -> int:
        hit = self.cache.serve(self.tokens(pages))
        assert_bound(self.policy)
        assert_pools(self.policy)
        return hit


PATHS = st.lists(st.integers(0, 3), min_size=1, max_size=8)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("begin"), PATHS),
        st.tuples(st.just("load"), st.integers(0, 9), st.lists(st.integers(0, 3), max_size=3)),
        st.tuples(st.just("end"), st.integers(0, 9)),
        st.tuples(st.just("serve"), PATHS),
        st.tuples(st.just("evict"), st.integers(0, 30)),
    ),
    max_size=70,
)


@settings(max_examples=120, deadline=None, derandomize=True)
@given(
    steps=STEPS,
    rule=st.sampled_from(sorted(RULES)),
    page_size=st.sampled_from([1, 2, 16, 24, 64]),
    capacity_pages=st.integers(10, 40),
    seed=st.integers(0, 99),
)
def test_the_bound_holds_after_every_call_under_locks(
    steps: list[tuple[Any, ...]], rule: str, page_size: int, capacity_pages: int, seed: int
) -> None:
    scene = Scene(guarded(rule, seed), capacity_pages=capacity_pages, page_size=page_size)
    for name, *values in steps:
        if name == "serve" and scene.running:
            continue  # alone or not at all: what is locked may leave no room
        if name == "evict":
            unlocked = scene.cache.evictable_tokens
            wanted = values[0] * page_size
            assert scene.cache.evict(wanted) == min(wanted, unlocked)
            assert_pools(scene.policy)
            continue
        getattr(scene, name)(*values)
    assert_bound(scene.policy)


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("rule", ["upside down", "most recent"])
@pytest.mark.parametrize("load", ["cycle", "locality", "both"])
def test_the_bound_holds_on_long_adversarial_loads_that_drive_the_frame_into_safe_mode(
    load: str, rule: str, page_size: int
) -> None:
    per_block = max(1, 64 // page_size)
    scene = Scene(guarded(rule, 1), capacity_pages=60 * per_block, page_size=page_size)
    rng = random.Random(2)
    hot, cycle = [[100 + i] * 6 for i in range(8)], [[i] * 4 for i in range(18)]
    requests = 500
    for number in range(requests):
        local = load == "locality" or (load == "both" and number // 100 % 2)
        head = hot[int(rng.random() ** 2 * 8)] if local else cycle[number % 18]
        tail = [rng.randrange(1000, 9000)] * 2 if local else []
        scene.serve([page for page in head + tail for _ in range(per_block)])
    if load != "cycle":
        assert scene.policy.debt.safe_entries > 0


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_forced_safe_is_exactly_the_ghost(page_size: int) -> None:
    per_block = max(1, 64 // page_size)
    policy = guarded("upside down", 3, always_safe=True)
    scene = Scene(policy, capacity_pages=50 * per_block, page_size=page_size)
    rng = random.Random(4)
    for _ in range(400):
        path = [rng.randrange(6) for _ in range(rng.randrange(1, 9))]
        scene.serve([page for page in path for _ in range(per_block)])
        assert policy.debt.own_loads == policy.debt.ghost_loads
    assert policy.debt.own_loads > 4 * 50


def test_the_ghost_faults_as_rlt_does() -> None:
    """On the cycle of B − L + 2 paths, where LRU misses each time."""
    capacity, shared, rounds = 60, 10, 40
    paths = [[*range(shared), 1000 + path] for path in range(capacity - shared + 1)]
    tokens = [array("I", [page for page in path for _ in range(64)]) for path in paths]
    ghost_loads, rlt_loads = 0, 0
    for seed in range(6):
        ghost = GhostRLT(
            capacity=capacity,
            rng=random.Random(seed),
            is_locked=lambda name: False,
            on_load=lambda name: None,
            on_evict=lambda name: None,
        )
        cache = RadixCache(
            capacity_tokens=64 * capacity, page_size=64, policy=RandomizedLeafTokens(random.Random(seed))
        )
        for _ in range(rounds):
            ghost_loads += sum(ghost.access(path) for path in paths)
            rlt_loads += sum(shared + 1 - cache.serve(path) // 64 for path in tokens)
        assert len(ghost) == capacity
    assert ghost_loads == pytest.approx(rlt_loads, rel=0.1)
    assert ghost_loads < 0.5 * 6 * rounds * len(paths)


def test_a_locked_leaf_stays_in_the_ghost_until_it_is_let_go() -> None:
    locked = {1, 2}
    gone: list[int] = []
    ghost = GhostRLT(
        capacity=3, rng=random.Random(0), is_locked=locked.__contains__, on_load=lambda _: None, on_evict=gone.append
    )
    for name in range(1, 40):
        ghost.access([name])
    assert 1 in ghost
    assert 2 in ghost
    assert len(ghost) == 3
    locked.clear()
    for name in range(40, 80):
        ghost.access([name])
    assert {1, 2} <= set(gone)


def test_a_path_that_finds_no_room_beside_locks_is_loaded_past_the_ghost() -> None:
    ghost = GhostRLT(
        capacity=2,
        rng=random.Random(0),
        is_locked=lambda name: name in (1, 2),
        on_load=lambda _: None,
        on_evict=lambda _: None,
    )
    ghost.access([1, 2])
    assert ghost.access([7, 8, 9]) == 3
    assert (len(ghost), 1 in ghost, 7 in ghost) == (2, True, False)


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_same_seed_same_victims(page_size: int) -> None:
    def hits(seed: int) -> list[int]:
        cache = RadixCache(
            capacity_tokens=9_600, page_size=page_size, policy=make_policy("rlt-adaptive", random.Random(seed))
        )
        rng = random.Random(1)
        heads = [[rng.randrange(9999) for _ in range(128)] for _ in range(99)]
        return [cache.serve(array("I", rng.choice(heads) + [rng.randrange(9999)] * 64)) for _ in range(400)]

    assert hits(5) == hits(5)
    assert hits(5) != hits(6)


def test_what_is_remembered_is_bounded_by_the_capacity() -> None:
    rule = LearnedRule(random.Random(1))
    policy = GuardedEviction(rule, random.Random(2))
    scene = Scene(policy, capacity_pages=64, page_size=64)
    rng = random.Random(3)
    most = 0
    for _ in range(400):
        scene.serve([rng.randrange(9), *(rng.randrange(10**6) for _ in range(5))])
        most = max(most, rule.memory_entries)
    assert most <= 64 + 8 * 64 // sampling_period(64)
    assert most > 64


def test_one_name_in_many_is_watched_and_of_these_the_latest() -> None:
    assert [sampling_period(capacity) for capacity in (8191, 8192, 32767, 32768)] == [8, 16, 16, 64]
    monitor = Monitor(16)
    for name in range(40):
        monitor.used(name, 0, now=name)
    assert len(monitor) == 16
    assert monitor.label_of(23) is None
    assert monitor.label_of(24) == 0


def test_a_flush_forgives_the_debt_and_keeps_what_was_learned() -> None:
    policy = guarded("most recent", 1)
    scene = Scene(policy, capacity_pages=40, page_size=64)
    rng = random.Random(1)
    for _ in range(60):
        scene.serve([int(rng.random() ** 2 * 8)] * 5 + [rng.randrange(1000, 9000)] * 2)
    debt = policy.debt
    own = debt.own_loads
    assert debt.phi > 0
    scene.cache.clear()
    assert (debt.phi, debt.is_safe, debt.own_loads) == (0, False, own)
    assert scene.serve([1] * 5) == 0
    assert debt.own_loads == own + 5


def test_the_policy_learns_to_keep_what_is_shared_when_lru_and_rlt_keep_little() -> None:
    rng = random.Random(3)
    heads = [array("I", rng.randbytes(4 * 1024)) for _ in range(24)]

    def hit_rate(name: str) -> float:
        cache = RadixCache(capacity_tokens=20_000, page_size=64, policy=make_policy(name, random.Random(1)))
        draw = random.Random(2)
        prompts = [heads[number % 24] + array("I", draw.randbytes(4 * 512)) for number in range(700)]
        return sum(map(cache.serve, prompts)) / sum(map(len, prompts))

    adaptive = hit_rate("rlt-adaptive")
    assert hit_rate("lru") < 0.05
    assert adaptive > hit_rate("rlt") + 0.1


def test_a_policy_without_a_tree_says_what_is_missing() -> None:
    with pytest.raises(RuntimeError, match="attached"):
        make_policy("rlt-adaptive", random.Random(0)).record(None, 1)
