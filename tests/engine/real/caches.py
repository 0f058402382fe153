"""SGLang's real cache classes without a model: caches, slots, and requests that pass as a scheduler's do."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from kvrouting_sglang.backend import policy_params
from kvrouting_sglang.cache import PolicyRadixCache


class Namespace(NamedTuple):
    """What separates requests with equal tokens."""

    extra_key: str | None = None
    cache_salt: str | None = None


PLAIN = Namespace()


def slots(capacity: int, page_size: int) -> Any:
    """An allocator of so many slots, without any KV behind them."""
    shared = {"dtype": torch.float32, "device": "cpu", "kvcache": None, "need_sort": False}
    if page_size == 1:
        return TokenToKVPoolAllocator(capacity, **shared)
    return PagedTokenToKVPoolAllocator(capacity, page_size, **shared)


def parameters(*, capacity: int, page_size: int, events: bool = True, tree: str | None = None) -> CacheInitParams:
    """What SGLang gives a cache of full-attention layers."""
    return CacheInitParams(
        disable=False,
        req_to_token_pool=None,
        token_to_kv_pool_allocator=slots(capacity, page_size),
        page_size=page_size,
        enable_kv_cache_events=events,
        tree_components=(ComponentType.FULL,),
        tree_core_backend=tree,
    )


def policy_cache(
    *, capacity: int, page_size: int, seed: int = 1, policy: str = "rlt", events: bool = True
) -> PolicyRadixCache:
    """The plug-in's cache."""
    params = parameters(capacity=capacity, page_size=page_size, events=events)
    return PolicyRadixCache(policy_params(params, policy=policy, seed=seed, dp_rank=0))


def stock_cache(*, capacity: int, page_size: int, tree: str, events: bool = True) -> UnifiedRadixCache:
    """SGLang's own cache with its LRU. tree: "python" or "rust"."""
    return UnifiedRadixCache(parameters(capacity=capacity, page_size=page_size, events=events, tree=tree))


class Running(NamedTuple):
    """An admitted request. lock: holds `hit` tokens of its path."""

    tokens: array[int]
    namespace: Namespace
    hit: int
    node: int
    lock: Any


class NoRoomError(RuntimeError):
    """Too much is locked."""


def key_of(tokens: Sequence[int], namespace: Namespace = PLAIN) -> RadixKey:
    return RadixKey(array("q", tokens), namespace.extra_key, cache_salt=namespace.cache_salt)


def admit(cache: Any, tokens: Sequence[int], namespace: Namespace = PLAIN) -> Running:
    """Looks up and locks the request's cached prefix."""
    match = cache.match_prefix(MatchPrefixParams(key=key_of(tokens, namespace)))
    lock = cache.lock(match.last_device_node)
    return Running(array("q", tokens), namespace, match.device_prefix_len, match.last_device_node, lock)


def load(cache: Any, running: Running, *, inserted_len: int = 0) -> int:
    """Makes room, takes slots, inserts the path and lets go of the prefix. Returns the tokens loaded.

    Raises: NoRoomError if what is locked leaves no room.
    """
    allocator = cache.token_to_kv_pool_allocator
    end = len(running.tokens) // cache.page_size * cache.page_size
    missing = end - running.hit
    shortfall = missing - allocator.available_size()
    if shortfall > 0:
        cache.evict_for_alloc(EvictParams(num_tokens=shortfall))
    fresh = allocator.alloc(missing) if missing else torch.empty(0, dtype=torch.int64)
    if fresh is None:
        cache.unlock(running.lock)
        raise NoRoomError(f"{missing} tokens")
    value = torch.cat((cache.path_device_indices(running.node), fresh))
    cache.insert(
        InsertParams(
            key=key_of(running.tokens[:end], running.namespace),
            value=value,
            prev_prefix_len=running.hit,
            inserted_len=inserted_len,
        )
    )
    cache.unlock(running.lock)
    return int(missing)


def serve(cache: Any, tokens: Sequence[int], namespace: Namespace = PLAIN) -> int:
    """One request from admission to end, alone. Returns the tokens hit."""
    running = admit(cache, tokens, namespace)
    load(cache, running)
    return int(running.hit)


def used_slots(cache: Any) -> int:
    allocator = cache.token_to_kv_pool_allocator
    return int(allocator.size - allocator.available_size())
