"""Any history of requests, at page sizes 1 to 64: the radix cache does what its one-page-per-node definition does."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvrouting_core.eviction import POLICIES, RandomizedLeafTokens, make_policy
from kvrouting_core.radix_cache import PathLock, RadixCache
from tests.core.radix_by_definition import (
    BlakeHasher,
    CacheByDefinition,
    HeldPath,
    MirroringSink,
    Page,
    Prefix,
    prefixes_of,
)

NAMESPACES = ("", "adapter")
PAGES = st.lists(st.integers(0, 2), max_size=7)


class Histories(RuleBasedStateMachine):
    """Drives the cache and its definition side by side; the definition learns of evictions from the change stream."""

    @initialize(
        page_size=st.sampled_from([1, 2, 3, 16, 64]),
        capacity_pages=st.integers(4, 14),
        spare_tokens=st.integers(0, 63),
        policy=st.sampled_from(sorted(POLICIES)),
        seed=st.integers(0, 2**32),
    )
    def start(self, page_size: int, capacity_pages: int, spare_tokens: int, policy: str, seed: int) -> None:
        self.page_size = page_size
        self.policy_name = policy
        self.policy: Any = make_policy(policy, random.Random(seed))
        self.sink = MirroringSink()
        self.hasher = BlakeHasher(page_size)
        self.cache = RadixCache(
            capacity_tokens=capacity_pages * page_size + spare_tokens % page_size,
            policy=self.policy,
            page_size=page_size,
            hasher=self.hasher,
            changes=self.sink,
        )
        self.definition = CacheByDefinition(page_size=page_size)
        self.running: list[tuple[PathLock, HeldPath, list[int]]] = []
        self.inserted_tokens = self.evicted_tokens = 0

    def tokens(self, pages: Sequence[int], rest: int) -> list[int]:
        """Pages that differ in their last token only, and the beginning of one more page."""
        whole = [token for page in pages for token in [7] * (self.page_size - 1) + [page]]
        return whole + [7] * (rest % self.page_size)

    @rule(pages=PAGES, rest=st.integers(0, 63), namespace=st.sampled_from(NAMESPACES))
    def match(self, pages: list[int], rest: int, namespace: Hashable) -> None:
        tokens = self.tokens(pages, rest)
        cached = self.definition.cached(tokens, namespace)
        unlocked = [prefix for prefix in cached if self.definition.pages[prefix].locks == 0]
        match = self.cache.match(tokens, namespace)
        assert match.tokens == len(cached) * self.page_size
        assert match.unlocked_tokens == len(unlocked) * self.page_size

    @rule(pages=PAGES, rest=st.integers(0, 63), namespace=st.sampled_from(NAMESPACES))
    def admit(self, pages: list[int], rest: int, namespace: Hashable) -> None:
        tokens = self.tokens(pages, rest)
        lock = self.cache.lock(tokens, namespace)
        held = self.definition.lock(tokens, namespace)
        assert lock.hit_tokens == len(held.held) * self.page_size
        self.running.append((lock, held, tokens))

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 99), longer=PAGES, rest=st.integers(0, 63))
    def load(self, which: int, longer: list[int], rest: int) -> None:
        """A chunk of prefill, or the answer: room is made and a longer path inserted, if it fits beside the locks."""
        lock, held, tokens = self.running.pop(which % len(self.running))
        tokens = self.tokens([*tokens[self.page_size - 1 :: self.page_size], *longer], rest)
        while self.shortfall(held, tokens) > 0 and self.cache.evictable_tokens:
            self.evict(self.shortfall(held, tokens))
        if self.shortfall(held, tokens) <= 0:
            new = self.cache.insert(lock, tokens)
            assert new == self.definition.insert(held, tokens)
            self.inserted_tokens += new
        self.running.append((lock, held, tokens))

    def shortfall(self, held: HeldPath, tokens: list[int]) -> int:
        path = self.definition.prefixes(tokens, held.namespace)
        cached = self.definition.cached(tokens, held.namespace)
        return (len(path) - len(cached)) * self.page_size - self.cache.free_tokens

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 99))
    def end(self, which: int) -> None:
        lock, held, _ = self.running.pop(which % len(self.running))
        self.cache.unlock(lock)
        self.definition.unlock(held)

    @rule(tokens=st.integers(0, 200))
    def evict(self, tokens: int) -> None:
        unlocked, drawable = self.definition.unlocked(), self.definition.drawable()
        leaves_first = self.whole_leaves_by_definition(tokens)
        phase = getattr(self.policy, "phase", 0)
        freed = self.cache.evict(tokens)
        removals = self.sink.take()
        gone = {prefix for removal in removals for prefix in removal}
        assert freed == len(gone) * self.page_size
        assert gone <= unlocked
        for removal in removals:
            assert not self.definition.has_child(removal[-1])
            self.definition.remove(removal)
        self.evicted_tokens += freed
        wanted = min(-(-tokens // self.page_size), len(unlocked))
        if self.policy_name in ("rlt", "random", "rlt-adaptive"):
            assert len(gone) == wanted
        else:
            assert gone == leaves_first
        if isinstance(self.policy, RandomizedLeafTokens):
            self.check_marks(gone, drawable, wanted, self.policy.phase - phase)

    def check_marks(self, gone: set[Prefix], drawable: set[Prefix], wanted: int, new_phases: int) -> None:
        """Marked pages go only once every page that may go without a new phase is gone, and then in a new phase."""
        if wanted <= len(drawable):
            assert gone <= drawable
            assert new_phases == 0
        else:
            assert drawable <= gone
            assert new_phases == 1
            self.definition.marked.clear()

    def whole_leaves_by_definition(self, tokens: int) -> set[Prefix]:
        """The pages that leaf by leaf eviction takes: nodes as the snapshot has them, all leaves sorted each time."""
        keys: dict[str, Callable[[Page], Any]] = {
            "lru": lambda page: page.access,
            "lfu": lambda page: (page.hits, page.access),
            "slru": lambda page: (page.hits >= 2, page.access),
        }
        gone: set[Prefix] = set()
        if self.policy_name not in keys:
            return gone
        key, pages = keys[self.policy_name], self.definition.pages
        nodes = [list(prefixes_of(record, self.sink.live).values()) for record in self.cache.snapshot()]
        while len(gone) * self.page_size < tokens:
            parents = {(node[0][0], node[0][1][: -self.page_size]) for node in nodes}
            leaves = [node for node in nodes if node[-1] not in parents and pages[node[-1]].locks == 0]
            if not leaves:
                break
            victim = min(leaves, key=lambda node: key(pages[node[-1]]))
            nodes.remove(victim)
            gone |= set(victim)
        return gone

    @precondition(lambda self: not self.running)
    @rule()
    def clear(self) -> None:
        self.cache.clear()
        self.evicted_tokens += len(self.definition.pages) * self.page_size
        self.definition.remove(list(self.definition.pages))
        self.definition.marked.clear()
        assert self.sink.clears > 0

    @invariant()
    def figures_agree(self) -> None:
        pages, size = self.definition.pages, self.page_size
        unlocked = len(self.definition.unlocked()) * size
        assert self.cache.live_pages == len(pages)
        assert self.cache.used_tokens == len(pages) * size == self.inserted_tokens - self.evicted_tokens
        assert self.cache.evictable_tokens == unlocked
        assert self.cache.locked_tokens == len(pages) * size - unlocked
        assert self.cache.free_tokens == self.cache.capacity_tokens - len(pages) * size >= 0

    @invariant()
    def stream_snapshot_and_digest_tell_the_same(self) -> None:
        assert sorted(map(repr, self.sink.live.values())) == sorted(map(repr, self.definition.pages))
        told: dict[int, Prefix] = {}
        for record in self.cache.snapshot():
            told.update(prefixes_of(record, told))
        assert told == self.sink.live
        assert self.cache.digest == sum(told) % 2**64

    @invariant()
    def marked_pages_stay_cached(self) -> None:
        """So B marked tokens fill the cache, and the access to one more is a load that finds no unmarked leaf:
        RLT needs no counter to start a phase at B + 1 distinct marks.
        """
        if self.policy_name == "rlt":
            assert self.definition.marked <= set(self.definition.pages)
            assert self.policy.marked_pages == len(self.definition.marked)


TestHistories = Histories.TestCase
TestHistories.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
