"""RLT evicts, in distribution, as its one-token-at-a-time definition does; three near misses are told apart."""

from __future__ import annotations

import functools
import random
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from kvrouting_core.eviction import EvictionPolicy, RandomizedLeafTokens
from kvrouting_core.eviction.base import ExposeParent
from kvrouting_core.eviction.rlt import MarkedRecord
from kvrouting_core.radix_cache import RadixCache
from tests.core.chi_square import rejects

Text = str
"""A path with one letter per page."""
Cached = frozenset[Text]
Distribution = dict[Cached, float]
SAMPLES = 4000


@dataclass(frozen=True, kw_only=True)
class Scene:
    """old: paths of the phase before. fresh: paths touched in this phase, maybe parts of old ones. held: locked ones.

    Then `pages` pages are evicted in one call.
    """

    old: tuple[Text, ...]
    fresh: tuple[Text, ...]
    held: tuple[Text, ...]
    pages: int

    def cached(self) -> Cached:
        return _prefixes(self.old + self.fresh)


def _prefixes(paths: Sequence[Text]) -> Cached:
    return frozenset(path[:end] for path in paths for end in range(1, len(path) + 1))


SCENES = (
    Scene(old=("ab", "acdefg", "h"), fresh=(), held=(), pages=3),
    Scene(old=("abcd", "abef", "ag", "hijk"), fresh=("ag",), held=(), pages=5),
    Scene(old=("abcde", "fgh", "fij"), fresh=("abc", "f"), held=(), pages=6),
    Scene(old=("abcd", "abce", "fghij"), fresh=(), held=("abc", "f"), pages=4),
    Scene(old=("ab", "cd"), fresh=("efghi", "ejk", "l"), held=(), pages=7),
)


def by_definition(scene: Scene) -> Distribution:
    """Draws one leaf page at a time, uniformly among the unmarked ones, and follows every outcome."""
    locked = _prefixes(scene.held)
    marked = _prefixes(scene.fresh + scene.held)
    states: dict[tuple[Cached, Cached], float] = {(scene.cached(), marked): 1.0}
    for _ in range(scene.pages):
        after: dict[tuple[Cached, Cached], float] = defaultdict(float)
        for (cached, marks), probability in states.items():
            leaves = [page for page in cached - locked if not any(o[:-1] == page for o in cached)]
            unmarked = [page for page in leaves if page not in marks]
            if not unmarked:
                unmarked, marks = leaves, frozenset()
            for page in unmarked:
                after[cached - {page}, marks] += probability / len(unmarked)
        states = after
    result: Distribution = defaultdict(float)
    for (cached, _), probability in states.items():
        result[cached] += probability
    return dict(result)


def sample(scene: Scene, policy: EvictionPolicy[Any], page_size: int) -> Cached:
    """What one cache has left of the scene."""
    cache = RadixCache(capacity_tokens=1000, policy=policy, page_size=page_size)
    for path in scene.old:
        cache.serve(_tokens(path, page_size))
    _pass_a_phase(cache, scene.old)
    for path in scene.fresh:
        cache.serve(_tokens(path, page_size))
    for path in scene.held:
        assert cache.lock(_tokens(path, page_size)).hit_tokens == len(path) * page_size
    assert cache.evict(scene.pages * page_size) == scene.pages * page_size
    return _left(cache, scene.old + scene.fresh)


def _left(cache: RadixCache, paths: Sequence[Text]) -> Cached:
    size = cache.page_size
    return _prefixes([path[: cache.match(_tokens(path, size)).tokens // size] for path in paths])


@functools.cache
def _tokens(path: Text, page_size: int) -> array[int]:
    return array("I", [ord(letter) for letter in path for _ in range(page_size)])


def _pass_a_phase(cache: RadixCache, paths: Sequence[Text]) -> None:
    """Has RLT start a phase while all that may be evicted is one page, and that is not of the scene."""
    locks = [cache.lock(_tokens(path, cache.page_size)) for path in paths]
    cache.serve(_tokens("z", cache.page_size))
    assert cache.evict(1) == cache.page_size
    for lock in locks:
        cache.unlock(lock)


def fits(policy: Callable[[random.Random], EvictionPolicy[Any]], scene: Scene, page_size: int) -> bool:
    """The test itself: are so many seeded runs a sample of the definition's distribution?"""
    exact: Mapping[Any, float] = by_definition(scene)
    assert abs(sum(exact.values()) - 1) < 1e-9
    counts: Counter[Any] = Counter(sample(scene, policy(random.Random(seed)), page_size) for seed in range(SAMPLES))
    return not rejects(counts, exact)


class WholeLeafAtOnce(RandomizedLeafTokens):
    """Mutant: a drawn leaf goes as far as the call needs."""

    def choose(self, pages: int, expose_parent: ExposeParent) -> list[tuple[MarkedRecord, int]]:
        taken: dict[MarkedRecord, int] = {}
        while pages > 0 and (len(self._unmarked) or len(self._marked)):
            if not len(self._unmarked):
                self._start_phase()
            pool = self._unmarked._records
            record = pool[int(self._rng.random() * len(pool))]
            count = min(pages, record.pages - taken.get(record, 0))
            taken[record] = taken.get(record, 0) + count
            pages -= count
            if taken[record] == record.pages:
                self._unmarked.remove(record)
                parent = expose_parent(record)
                if parent is not None:
                    self.evictable(parent)
        return list(taken.items())


class WeightedByLength(RandomizedLeafTokens):
    """Mutant: a leaf is drawn in proportion to the pages it has left."""

    def choose(self, pages: int, expose_parent: ExposeParent) -> list[tuple[MarkedRecord, int]]:
        taken: dict[MarkedRecord, int] = {}
        for _ in range(pages):
            if not len(self._unmarked):
                self._start_phase()
            pool = self._unmarked._records
            weights = [record.pages - taken.get(record, 0) for record in pool]
            record = self._rng.choices(pool, weights)[0]
            taken[record] = taken.get(record, 0) + 1
            if taken[record] == record.pages:
                self._unmarked.remove(record)
                parent = expose_parent(record)
                if parent is not None:
                    self.evictable(parent)
        return list(taken.items())


class MarksIgnored(RandomizedLeafTokens):
    """Mutant: no access leaves a mark."""

    def _mark(self, records: Sequence[MarkedRecord]) -> None:
        return


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("scene", SCENES)
def test_one_call_for_k_pages_is_k_draws_in_distribution(scene: Scene, page_size: int) -> None:
    assert fits(RandomizedLeafTokens, scene, page_size)


@pytest.mark.parametrize("mutant", [WholeLeafAtOnce, WeightedByLength, MarksIgnored])
def test_the_test_tells_near_misses_apart(mutant: type[RandomizedLeafTokens]) -> None:
    assert any(not fits(mutant, scene, 1) for scene in SCENES)


B = 9
REQUESTS = ("e", "j", "abn", "fg", "fg", "e", "fhi", "adq", "abm", "ab", "adq", "ac", "k", "ac")


def the_papers_process(requests: Sequence[Text], capacity: int) -> Distribution:
    """Algorithm 1 to the letter: token by token, a counter of distinct marked tokens, a phase at the (B+1)st."""
    states: dict[tuple[Cached, Cached], float] = {(frozenset(), frozenset()): 1.0}
    for path in requests:
        for end in range(1, len(path) + 1):
            after: dict[tuple[Cached, Cached], float] = defaultdict(float)
            for (cached, marks), probability in states.items():
                for state, share in _access_one(path[:end], cached, marks, capacity):
                    after[state] += probability * share
            states = after
    result: Distribution = defaultdict(float)
    for (cached, _), probability in states.items():
        result[cached] += probability
    return dict(result)


def _access_one(token: Text, cached: Cached, marks: Cached, capacity: int) -> list[tuple[tuple[Cached, Cached], float]]:
    marks = marks | {token}
    if len(marks) == capacity + 1:
        marks = frozenset({token})
    if token in cached or len(cached) < capacity:
        return [((cached | {token}, marks), 1.0)]
    in_use = _prefixes([token])
    leaves = [page for page in cached - in_use if not any(other[:-1] == page for other in cached)]
    unmarked = [page for page in leaves if page not in marks]
    if not unmarked:
        unmarked, marks = leaves, frozenset({token})
    return [((cached - {page} | {token}, marks), 1 / len(unmarked)) for page in unmarked]


@pytest.mark.parametrize("served", [8, 10, 12, 14])
def test_whole_requests_are_served_as_the_papers_token_by_token_process(served: int) -> None:
    exact: Mapping[Any, float] = the_papers_process(REQUESTS[:served], B)
    counts: Counter[Any] = Counter()
    for seed in range(SAMPLES):
        cache = RadixCache(capacity_tokens=B, policy=RandomizedLeafTokens(random.Random(seed)))
        for path in REQUESTS[:served]:
            cache.serve(_tokens(path, 1))
        counts[_left(cache, REQUESTS)] += 1
    assert len(exact) >= 8
    assert not rejects(counts, exact)
