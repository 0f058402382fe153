"""The cheap way from a cache's changes to routing blocks gives what the product's way gives."""

from __future__ import annotations

import random
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrouting_core.blocks import Namespace
from kvrouting_core.eviction import make_policy
from kvrouting_core.identity import WorkerId
from kvrouting_core.prefix_index import PrefixIndex
from kvrouting_core.radix_cache import RadixCache
from kvrouting_simulator.experiment.index_feed import (
    BlockEndFeed,
    IndexFeed,
    MirrorFeed,
    apply_deltas,
    block_hasher,
    index_feed,
)

NAMESPACE = Namespace(model="m")
BLOCK = 16


class Fed:
    """A small cache, its feed, and an index with what the feed told."""

    def __init__(self, feed: IndexFeed, page_size: int, eviction: str) -> None:
        self.feed = feed
        self.index = PrefixIndex()
        self.worker = WorkerId("w/0")
        self.cache = RadixCache(
            capacity_tokens=256,
            page_size=page_size,
            policy=make_policy(eviction, random.Random(2)),
            hasher=feed.hasher,
            changes=feed.sink,
        )

    def serve(self, tokens: array[int]) -> None:
        self.cache.serve(tokens, NAMESPACE)
        apply_deltas(self.index, self.worker, self.feed.drain())

    def clear(self) -> None:
        self.cache.clear()
        apply_deltas(self.index, self.worker, self.feed.drain())

    def match(self, tokens: array[int]) -> int:
        blocks = block_hasher(BLOCK).hash_blocks(NAMESPACE, tokens)
        assert not self.index.audit(blocks)
        return self.index.match(blocks).get(self.worker, 0)


def prompt(rng: random.Random) -> array[int]:
    family, length = rng.randrange(4), rng.randrange(1, 150)
    own = rng.randrange(length + 1)
    return array("I", [1000 * family + i for i in range(own)] + [rng.randrange(3) for _ in range(length - own)])


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    page_size=st.sampled_from([1, 2, 8, 16]),
    eviction=st.sampled_from(["lru", "rlt", "random"]),
)
def test_block_end_feed_equals_the_mirror_and_the_cache(seed: int, page_size: int, eviction: str) -> None:
    hasher = block_hasher(BLOCK)
    cheap = Fed(BlockEndFeed(page_size=page_size, blocks=hasher), page_size, eviction)
    whole = Fed(MirrorFeed(page_size=page_size, blocks=hasher, namespace=NAMESPACE), page_size, eviction)
    rng = random.Random(seed)
    for _ in range(30):
        if rng.random() < 0.03:
            cheap.clear()
            whole.clear()
        tokens = prompt(rng)
        cheap.serve(tokens)
        whole.serve(tokens)
        assert cheap.index.count(cheap.worker) == whole.index.count(whole.worker)
        assert cheap.index.digest(cheap.worker) == whole.index.digest(whole.worker)
        asked = prompt(rng)
        assert cheap.match(asked) == cheap.cache.match(asked, NAMESPACE).tokens // BLOCK


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10_000), page_size=st.sampled_from([3, 24, 64]))
def test_pages_that_do_not_divide_blocks_go_through_the_mirror(seed: int, page_size: int) -> None:
    """The index may know more than whole pages, which alone the engine can use: less than a page more."""
    feed = index_feed(page_size=page_size, blocks=block_hasher(BLOCK), namespace=NAMESPACE)
    assert isinstance(feed, MirrorFeed)
    fed = Fed(feed, page_size, "rlt")
    rng = random.Random(seed)
    for _ in range(20):
        fed.serve(prompt(rng))
        asked = prompt(rng)
        usable = fed.cache.match(asked, NAMESPACE).tokens
        assert usable // BLOCK * BLOCK <= fed.match(asked) * BLOCK < usable + page_size


def test_sizes_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="page size 3 does not divide block size 16"):
        BlockEndFeed(page_size=3, blocks=block_hasher(BLOCK))
    with pytest.raises(TypeError, match="namespace must be a Namespace, got 'x'"):
        BlockEndFeed(page_size=1, blocks=block_hasher(BLOCK)).root("x")
