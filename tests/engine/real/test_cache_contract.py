"""The plug-in on SGLang's real cache classes, over random histories."""

from __future__ import annotations

import random
from typing import Any

import pytest

from kvrouting_core.eviction import POLICIES, GuardedEviction, RandomizedLeafTokens, make_policy
from kvrouting_core.radix_cache import RadixCache
from tests.engine.real.admissions import ToldAtTheInsert
from tests.engine.real.caches import PLAIN, admit, load, policy_cache, serve, used_slots
from tests.engine.real.conftest import TAIL_POLICIES, Interpreters
from tests.engine.real.histories import History
from tests.engine.real.mirrors import EventMirror, digest, real_pages

PAGES = pytest.mark.parametrize("page_size", [1, 4, 16])
TAILS = pytest.mark.parametrize("policy", TAIL_POLICIES)
CAPACITY_PAGES = 120


def pages_by_mark(cache: Any) -> tuple[set[int], set[int]]:
    """(marked, unmarked) hashes of the unlocked pages of the real tree."""
    tree, policy = cache.tree_core, cache.tree_core.policy
    groups: tuple[set[int], set[int]] = set(), set()
    for nodes in tree.live_nodes.walk():
        for node in nodes:
            if node.parent is not None and not node.component_data[0].lock_ref:
                hashes = tree.kv_events.published_hashes(node, tree.kv_events.hash_values(node))
                groups[0 if node.record.mark == policy.phase else 1].update(hashes)
    return groups


@PAGES
@pytest.mark.parametrize("policy", POLICIES)
def test_events_tree_and_slots_agree_after_each_step(policy: str, page_size: int) -> None:
    cache = policy_cache(capacity=CAPACITY_PAGES * page_size, page_size=page_size, policy=policy)
    history, mirror = History(cache, seed=page_size), EventMirror()
    for number in history.steps(400):
        mirror.apply(cache.take_events())
        assert cache.evictable_size() + cache.protected_size() == used_slots(cache)
        assert len(mirror.live) * page_size == used_slots(cache)
        if number % 10 == 0:
            assert mirror.live == real_pages(cache)
            position = cache.tree_core.kv_events.published
            assert (position.pages, position.digest) == (len(mirror.live), digest(real_pages(cache)))
    assert cache.tree_core.evicted_tokens > 10 * CAPACITY_PAGES * page_size // 4
    history.finish()
    mirror.apply(cache.take_events())
    cache.sanity_check()
    assert len(mirror.live) * page_size == cache.evictable_size() == used_slots(cache)


@PAGES
@TAILS
def test_everything_unlocked_can_be_evicted(policy: str, page_size: int) -> None:
    cache = policy_cache(capacity=CAPACITY_PAGES * page_size, page_size=page_size, policy=policy)
    history, mirror = History(cache, seed=3), EventMirror()
    list(history.steps(200))
    history.finish()
    assert cache.tree_core.evict_pages(10**9)
    mirror.apply(cache.take_events())
    assert not mirror.live
    assert cache.evictable_size() == 0
    assert not cache.root_node.children


@PAGES
def test_marked_pages_are_spared_while_unmarked_ones_remain(page_size: int) -> None:
    cache = policy_cache(capacity=CAPACITY_PAGES * page_size, page_size=page_size)
    history = History(cache, seed=5)
    policy = cache.tree_core.policy
    evictions = phases = 0
    rng = random.Random(7)
    for _ in history.steps(300):
        cache.take_events()
        marked, unmarked = pages_by_mark(cache)
        phase, live = policy.phase, set(real_pages(cache))
        cache.token_to_kv_pool_allocator.free_segment(
            _joined(cache.tree_core.evict_pages(rng.randrange(1, 8))), start_pos=0
        )
        gone = live - set(real_pages(cache))
        evictions += len(gone)
        if policy.phase == phase:
            assert gone <= unmarked
        else:
            phases += 1
            assert unmarked <= gone
            assert policy.phase == phase + 1 or not unmarked | marked
    assert evictions > 300
    assert phases > 3


def _joined(slots: list[Any]) -> Any:
    import torch

    return torch.cat(slots) if slots else torch.empty(0, dtype=torch.int64)


@PAGES
@TAILS
def test_locked_pages_are_spared(policy: str, page_size: int) -> None:
    cache = policy_cache(capacity=CAPACITY_PAGES * page_size, page_size=page_size, policy=policy)
    rng = random.Random(1)
    held = [rng.randrange(1000) for _ in range(40 * page_size)]
    serve(cache, held)
    running = admit(cache, held)
    assert running.hit == len(held)
    for _ in range(60):
        serve(cache, [rng.randrange(1000) for _ in range(50 * page_size)])
        probe = admit(cache, held)
        assert probe.hit == len(held)
        cache.unlock(probe.lock)
    freed = sum(map(len, cache.tree_core.evict_pages(10**9)))
    assert freed == used_slots(cache) - cache.protected_size()
    assert cache.protected_size() == len(held)


@PAGES
@TAILS
def test_a_trimmed_leaf_still_matches_up_to_its_cut(policy: str, page_size: int) -> None:
    cache = policy_cache(capacity=CAPACITY_PAGES * page_size, page_size=page_size, policy=policy)
    tokens = list(range(30 * page_size))
    serve(cache, tokens)
    before = cache.path_device_indices(admit(cache, tokens).node).tolist()
    cache.reset()
    serve(cache, tokens)
    cache.tree_core.evict_pages(11)
    running = admit(cache, tokens)
    assert running.hit == 19 * page_size
    assert len(cache.path_device_indices(running.node)) == 19 * page_size
    assert len(before) == len(tokens)
    load(cache, running)
    assert admit(cache, [*tokens, 1]).hit == len(tokens)


def _core_pages(cache: RadixCache, page_size: int) -> set[tuple[int, ...]]:
    """The live pages of core's cache, each as the path that it ends."""
    paths: set[tuple[int, ...]] = set()

    def below(node: Any, path: tuple[int, ...]) -> None:
        from kvrouting_core.radix_tree import unpack_tokens

        for child in node.children.values():
            tokens = path + tuple(unpack_tokens(child.edge))
            paths.update(tokens[:end] for end in range(len(path) + page_size, len(tokens) + 1, page_size))
            below(child, tokens)

    for root in cache._roots.values():
        below(root, ())
    return paths


def _real_paths(cache: Any, page_size: int) -> set[tuple[int, ...]]:
    paths: set[tuple[int, ...]] = set()

    def below(node: Any, path: tuple[int, ...]) -> None:
        for child in node.children.values():
            tokens = path + tuple(child.key)
            paths.update(tokens[:end] for end in range(len(path) + page_size, len(tokens) + 1, page_size))
            below(child, tokens)

    below(cache.root_node, ())
    return paths


@PAGES
@pytest.mark.parametrize("policy", POLICIES)
def test_victims_are_those_of_cores_cache_for_the_same_coins_and_history(policy: str, page_size: int) -> None:
    """Stronger than equal in distribution: hit for hit and page for page the same."""
    capacity = CAPACITY_PAGES * page_size
    real = policy_cache(capacity=capacity, page_size=page_size, policy=policy, seed=9)
    chooser = ToldAtTheInsert(make_policy(policy, random.Random("9:0")))
    core = RadixCache(capacity_tokens=capacity, page_size=page_size, policy=chooser)
    rng = random.Random(page_size)
    prompts = [[rng.randrange(5000) for _ in range(20 * page_size)] for _ in range(9)]
    for number in range(300):
        prompt = prompts[rng.randrange(9)][: rng.randrange(1, 20 * page_size + 1)]
        if rng.random() < 0.3:
            prompt = prompt + [rng.randrange(5000) for _ in range(rng.randrange(1, 9 * page_size))]
            prompts[rng.randrange(9)] = prompt[: 20 * page_size]
        assert serve(real, prompt) == core.serve(prompt, (PLAIN.extra_key, PLAIN.cache_salt)), number
        assert real.evictable_size() == core.used_tokens
        if number % 5 == 0:
            assert _real_paths(real, page_size) == _core_pages(core, page_size)
    assert real.tree_core.evicted_tokens > 2 * capacity


@TAILS
def test_ranks_of_one_engine_evict_alike_whatever_their_hash_seeds(
    policy: str, starting_interpreters: Interpreters
) -> None:
    """As tensor-parallel ranks do: processes of their own that get the same requests and the same seed."""
    one, other = (rank.result()[policy] for rank in starting_interpreters.ranks)
    assert one == other
    assert one["evicted_tokens"] > 4000
    assert len(one["removed"]) > 4000


@TAILS
def test_a_flush_empties_stream_tree_and_policy(policy: str) -> None:
    cache = policy_cache(capacity=100, page_size=1, policy=policy)
    mirror = EventMirror()
    for number in range(10):
        serve(cache, range(number * 100, number * 100 + 40))
    mirror.apply(cache.take_events())
    assert mirror.live
    cache.reset()
    cache.token_to_kv_pool_allocator.clear()
    mirror.apply(cache.take_events())
    assert not mirror.live
    assert cache.tree_core.kv_events.published[1:] == (0, 0)
    for number in range(10):
        serve(cache, range(number * 100, number * 100 + 40))
    mirror.apply(cache.take_events())
    assert mirror.live == real_pages(cache)
    assert isinstance(cache.tree_core.policy, (RandomizedLeafTokens, GuardedEviction))


def test_without_events_nothing_is_hashed() -> None:
    cache = policy_cache(capacity=100, page_size=1, events=False)
    for number in range(20):
        serve(cache, range(number * 100, number * 100 + 40))
    assert cache.take_events() == []
    assert cache.evictable_size() == used_slots(cache)
    assert all(node.hash_value is None for node in cache.root_node.children.values())


def test_a_cycle_beyond_the_cache_hits_with_rlt_and_never_with_lru() -> None:
    hits = {}
    for policy in ("rlt", "rlt-adaptive", "lru"):
        cache = policy_cache(capacity=2000, page_size=1, policy=policy)
        prompts = [[random.Random(f"{number}").randrange(500) for _ in range(240)] for number in range(10)]
        hits[policy] = sum(serve(cache, prompt) for _ in range(20) for prompt in prompts) / (20 * 2400)
    assert hits["lru"] <= 0.01
    assert hits["rlt"] >= 0.4
    assert hits["rlt-adaptive"] >= 0.4


@PAGES
def test_the_guarantee_of_rlt_adaptive_holds_on_the_real_tree(page_size: int) -> None:
    """After each step, over histories with locks, and the figures of the state socket tell it."""
    cache = policy_cache(capacity=CAPACITY_PAGES * page_size, page_size=page_size, policy="rlt-adaptive")
    history, policy = History(cache, seed=page_size), cache.tree_core.policy
    for _ in history.steps(400):
        debt, longest = policy.debt, policy.longest_path_pages
        assert debt.phi <= 1.25 * policy.capacity_pages + longest
        assert debt.own_loads <= 1.02 * debt.ghost_loads + 1.25 * policy.capacity_pages + longest
        assert policy.figures()["phi_tokens"] <= policy.figures()["phi_bound_tokens"]
    assert debt.own_loads > 0
    assert debt.ghost_loads > 0
