"""What an engine relies on: whole pages, namespaces, locks, chunked prefill, room, and the stream of changes."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence

import pytest

from kvrouting_core.blocks import ChainHasher, Namespace
from kvrouting_core.eviction import LeafLRU, RandomizedLeafTokens
from kvrouting_core.radix_cache import CacheFullError, CacheInUseError, LockReleasedError, RadixCache
from kvrouting_core.radix_changes import StoredPages
from kvrouting_core.radix_tree import pack_tokens, unpack_tokens
from tests.core.radix_by_definition import BlakeHasher


class Recorder:
    """A sink that keeps what it hears."""

    def __init__(self) -> None:
        self.events: list[StoredPages | list[int] | None] = []

    def stored(self, pages: StoredPages) -> None:
        self.events.append(pages)

    def removed(self, hashes: array[int]) -> None:
        self.events.append(list(hashes))

    def cleared(self) -> None:
        self.events.append(None)


def cache(capacity_tokens: int = 100, page_size: int = 1) -> RadixCache:
    return RadixCache(capacity_tokens=capacity_tokens, page_size=page_size, policy=LeafLRU())


def test_an_incomplete_last_page_is_not_cached() -> None:
    kv = cache(page_size=4)
    kv.serve(range(10))
    assert kv.used_tokens == 8
    assert kv.match(range(10)).tokens == 8
    assert kv.match(range(7)).tokens == 4
    assert kv.match(range(3)).tokens == 0


def test_a_namespace_never_hits_another_one() -> None:
    kv = cache()
    kv.serve([1, 2, 3], "adapter-a")
    assert kv.match([1, 2, 3], "adapter-a").tokens == 3
    assert kv.match([1, 2, 3]).tokens == 0
    assert kv.lock([1, 2, 3], "adapter-b").hit_tokens == 0


def test_an_empty_namespace_takes_no_memory() -> None:
    kv = cache(capacity_tokens=4)
    for salt in range(50):
        kv.serve([1, 2, 3], f"salt-{salt}")
    unused = kv.lock([9], "never loaded")
    kv.unlock(unused)
    assert len(kv._roots) == 1


def test_a_lookup_is_no_access() -> None:
    kv = cache(capacity_tokens=2)
    kv.serve([1])
    kv.serve([2])
    kv.match([1])
    kv.serve([3])
    assert kv.match([1]).tokens == 0
    assert kv.match([2]).tokens == 1


def test_an_admission_is_an_access_to_the_cached_prefix() -> None:
    kv = cache(capacity_tokens=2)
    kv.serve([1])
    kv.serve([2])
    kv.unlock(kv.lock([1, 5]))
    kv.serve([3])
    assert kv.match([1]).tokens == 1
    assert kv.match([2]).tokens == 0


def test_an_admission_that_ends_within_an_edge_accesses_only_its_part() -> None:
    kv = cache(capacity_tokens=4)
    kv.serve([1, 2, 3])
    kv.serve([9])
    kv.unlock(kv.lock([1, 7]))
    kv.evict(1)
    assert kv.match([1, 2, 3]).tokens == 1
    assert kv.match([9]).tokens == 1


def test_limit_tokens_leaves_the_last_token_to_compute() -> None:
    kv = cache(page_size=2)
    kv.serve([1, 2, 3, 4])
    assert kv.match([1, 2, 3, 4], limit_tokens=3).tokens == 2
    lock = kv.lock([1, 2, 3, 4], limit_tokens=3)
    assert lock.hit_tokens == lock.tokens == kv.locked_tokens == 2
    assert kv.insert(lock, [1, 2, 3, 4]) == 0
    assert lock.tokens == kv.locked_tokens == 4
    assert lock.hit_tokens == 2


def test_locked_paths_and_what_is_above_them_stay() -> None:
    kv = cache(capacity_tokens=6)
    kv.serve([1, 2, 3])
    kv.serve([1, 2, 4])
    lock = kv.lock([1, 2, 4])
    assert (kv.used_tokens, kv.locked_tokens, kv.evictable_tokens, kv.free_tokens) == (4, 3, 1, 2)
    assert kv.evict(100) == 1
    assert kv.match([1, 2, 4]).tokens == 3
    kv.unlock(lock)
    assert kv.evict(100) == 3


def test_a_path_locked_twice_is_held_until_the_second_unlock() -> None:
    kv = cache()
    kv.serve([1, 2])
    first, second = kv.lock([1, 2]), kv.lock([1, 2, 3])
    kv.unlock(first)
    assert kv.evict(2) == 0
    kv.unlock(second)
    assert kv.evict(2) == 2


def test_a_released_lock_is_refused() -> None:
    kv = cache()
    lock = kv.lock([1, 2])
    kv.insert(lock, [1, 2])
    kv.unlock(lock)
    with pytest.raises(LockReleasedError, match="2 tokens"):
        kv.unlock(lock)
    with pytest.raises(LockReleasedError, match="insert of 3 tokens"):
        kv.insert(lock, [1, 2, 3])
    assert kv.locked_tokens == 0
    assert kv.evictable_tokens == 2


def test_chunked_prefill_inserts_longer_and_longer_prefixes_under_one_lock() -> None:
    kv = cache(page_size=2)
    prompt = list(range(11))
    lock = kv.lock(prompt)
    assert [kv.insert(lock, prompt[:end]) for end in (4, 7, 11, 11)] == [4, 2, 4, 0]
    assert kv.locked_tokens == 10
    assert kv.evict(1) == 0
    assert kv.insert(lock, [*prompt, 50, 51]) == 2
    kv.unlock(lock)
    assert kv.evictable_tokens == 12


def test_siblings_that_load_the_same_prefix_share_it() -> None:
    kv = cache()
    one, two = kv.lock([1, 2, 3, 4]), kv.lock([1, 2, 3, 5])
    assert kv.insert(one, [1, 2, 3, 4]) == 4
    assert kv.insert(two, [1, 2, 3, 5]) == 1
    kv.unlock(one)
    assert (kv.locked_tokens, kv.evictable_tokens) == (4, 1)
    kv.unlock(two)
    assert kv.evictable_tokens == 5


def test_an_insert_without_room_is_refused_and_changes_nothing() -> None:
    kv = cache(capacity_tokens=4)
    kv.serve([1, 2])
    lock = kv.lock([1, 3])
    with pytest.raises(CacheFullError, match="4 new tokens, but only 2 are free"):
        kv.insert(lock, [1, 3, 4, 5, 6])
    assert (kv.used_tokens, lock.tokens) == (2, 1)
    with pytest.raises(CacheFullError):
        kv.serve([7, 8, 9, 10])
    kv.unlock(lock)
    assert kv.locked_tokens == 0


def test_an_insert_of_another_path_is_refused() -> None:
    kv = cache()
    kv.serve([1, 2])
    lock = kv.lock([1, 2])
    with pytest.raises(ValueError, match="do not start with the 2 tokens of the lock"):
        kv.insert(lock, [1, 3])


def test_a_match_tells_what_a_lock_would_take_from_the_evictable_tokens() -> None:
    kv = cache()
    kv.serve([1, 2, 3, 4])
    lock = kv.lock([1, 2])
    assert kv.match([1, 2, 3, 9]) == (3, 1)
    before = kv.evictable_tokens
    kv.unlock(kv.lock([1, 2, 3, 9]))
    held = kv.lock([1, 2, 3, 9])
    assert before - kv.evictable_tokens == 1
    kv.unlock(held)
    kv.unlock(lock)


def test_reservations_take_from_the_free_tokens() -> None:
    kv = cache(capacity_tokens=10)
    kv.serve([1, 2, 3])
    kv.reserve(5)
    assert (kv.free_tokens, kv.reserved_tokens) == (2, 5)
    with pytest.raises(CacheFullError, match="only 2 are free"):
        kv.reserve(3)
    with pytest.raises(ValueError, match=r"must be in 0\.\.5, got 6"):
        kv.release(6)
    with pytest.raises(ValueError, match="-1"):
        kv.reserve(-1)
    kv.release(5)
    assert kv.free_tokens == 7


def test_clear_empties_all_namespaces_but_not_under_a_lock() -> None:
    kv = cache()
    kv.serve([1, 2])
    lock = kv.lock([5], "x")
    with pytest.raises(CacheInUseError):
        kv.clear()
    kv.unlock(lock)
    kv.clear()
    assert (kv.used_tokens, kv.match([1, 2]).tokens, kv.evict(5)) == (0, 0, 0)
    assert kv.serve([1, 2]) == 0
    assert kv.serve([1, 2]) == 2


@pytest.mark.parametrize(("capacity_tokens", "page_size"), [(10, 0), (10, 65), (3, 4)])
def test_impossible_sizes_are_refused(capacity_tokens: int, page_size: int) -> None:
    with pytest.raises(ValueError, match="page"):
        cache(capacity_tokens=capacity_tokens, page_size=page_size)


@pytest.mark.parametrize("tokens", [[1, -1], [2**32]])
def test_impossible_token_ids_are_refused(tokens: list[int]) -> None:
    with pytest.raises(ValueError, match=str(tokens[-1])):
        cache().lock(tokens)


@pytest.mark.parametrize("tokens", [b"ab", bytearray(b"ab"), "ab"])
def test_text_and_bytes_are_no_token_ids(tokens: Sequence[int]) -> None:
    with pytest.raises(TypeError, match="tokenize first"):
        cache().lock(tokens)


def test_tokens_are_packed_alike_from_any_sequence() -> None:
    ids = [0, 1, 2**32 - 1]
    assert pack_tokens(ids) == pack_tokens(tuple(ids)) == pack_tokens(array("I", ids))
    assert list(unpack_tokens(pack_tokens(array("Q", ids)))) == ids


def test_a_sink_without_a_hasher_is_refused() -> None:
    with pytest.raises(ValueError, match="hasher"):
        RadixCache(capacity_tokens=10, policy=LeafLRU(), changes=Recorder())


def test_without_a_hasher_there_is_no_digest_and_no_snapshot() -> None:
    kv = cache()
    kv.serve([1])
    assert kv.digest is None
    assert kv.live_pages == 1
    with pytest.raises(ValueError, match="hasher"):
        next(kv.snapshot())


def test_consecutive_pages_are_told_at_once_with_their_parent() -> None:
    sink, hasher = Recorder(), BlakeHasher(2)
    kv = RadixCache(capacity_tokens=20, page_size=2, policy=LeafLRU(), hasher=hasher, changes=sink)
    kv.serve([1, 2, 3, 4, 5, 6])
    kv.serve([1, 2, 3, 4, 7, 8, 9, 9], "")
    hashes, _ = hasher.extend(hasher.root(""), 0, [1, 2, 3, 4, 5, 6])
    first, second = sink.events
    assert isinstance(first, StoredPages)
    assert isinstance(second, StoredPages)
    assert (first.parent_hash, list(first.hashes), list(first.tokens)) == (None, hashes, [1, 2, 3, 4, 5, 6])
    assert (second.parent_hash, list(second.tokens)) == (hashes[1], [7, 8, 9, 9])


def test_a_trim_tells_exactly_the_removed_pages_and_an_empty_tree_says_so() -> None:
    sink, hasher = Recorder(), BlakeHasher(1)
    kv = RadixCache(capacity_tokens=20, policy=RandomizedLeafTokens(random.Random(0)), hasher=hasher, changes=sink)
    kv.serve(range(6))
    hashes, _ = hasher.extend(hasher.root(""), 0, range(6))
    kv.evict(2)
    kv.clear()
    assert sink.events[1:] == [hashes[4:], None]
    assert kv.digest == 0


def test_pages_under_a_trimmed_and_a_split_node_are_hashed_right() -> None:
    key, namespace = bytes(range(16)), Namespace(model="m", lora_adapter="a")
    hasher = ChainHasher(key, 4)
    kv = RadixCache(capacity_tokens=400, page_size=4, policy=RandomizedLeafTokens(random.Random(0)), hasher=hasher)
    rng = random.Random(1)
    trunk = [rng.randrange(1000) for _ in range(200)]
    paths = [trunk, trunk[:120] + trunk[:60], trunk[:40] + trunk[:100], trunk[:196] + trunk[:8]]
    kv.serve(paths[0], namespace)
    kv.evict(16)
    for path in paths[1:]:
        kv.serve(path, namespace)
    expected = {
        int(block)
        for path in paths
        for block in hasher.hash_blocks(namespace, path)[: kv.match(path, namespace).tokens // 4]
    }
    assert {page for record in kv.snapshot() for page in record.hashes} == expected
    assert kv.digest == sum(expected) % 2**64
