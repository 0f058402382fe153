"""Who holds which KV slots: what is in the radix tree, and what running requests hold beside it.

A request's prefix and everything it has inserted is in the tree under its lock. What it computes right now, and an
incomplete last page, is reserved beside the tree: pages(kv tokens) − tokens of its lock.
"""

from __future__ import annotations

from kvrouting_core.radix_cache import PathLock, PrefixMatch, RadixCache
from kvrouting_simulator.engine_model.sequence import Sequence


class KvSlots:
    """Hands the slots of one cache to sequences; never more than its capacity."""

    def __init__(self, cache: RadixCache) -> None:
        self._cache = cache
        self._page_size = cache.page_size

    @property
    def page_size(self) -> int:
        """Tokens a page."""
        return self._page_size

    @property
    def capacity_tokens(self) -> int:
        """Slots that can be used: whole pages."""
        return self.floor(self._cache.capacity_tokens)

    @property
    def room_tokens(self) -> int:
        """Slots that are free or can be made free by eviction: whole pages."""
        return self.floor(self._cache.free_tokens + self._cache.evictable_tokens)

    @property
    def used_tokens(self) -> int:
        """Slots that are neither free nor evictable."""
        return self._cache.capacity_tokens - self._cache.free_tokens - self._cache.evictable_tokens

    def floor(self, tokens: int) -> int:
        """Rounded down to whole pages."""
        return tokens - tokens % self._page_size

    def ceil(self, tokens: int) -> int:
        """Rounded up to whole pages."""
        return tokens + -tokens % self._page_size

    def match(self, sequence: Sequence) -> PrefixMatch:
        """The cached prefix of a waiting sequence, short of its last token, which is always computed."""
        path = sequence.path
        return self._cache.match(path, sequence.request.namespace, limit_tokens=len(path) - 1)

    def hold_prefix(self, sequence: Sequence) -> None:
        """Locks the cached prefix: the access of an admitted request."""
        path = sequence.path
        sequence.lock = self._cache.lock(path, sequence.request.namespace, limit_tokens=len(path) - 1)
        sequence.kv_tokens = sequence.lock.tokens

    def take(self, tokens: int) -> None:
        """Reserves whole pages, evicting what is short of them. The caller has checked `room_tokens`."""
        shortfall = tokens - self._cache.free_tokens
        if shortfall > 0:
            self._cache.evict(shortfall)
        self._cache.reserve(tokens)

    def store(self, sequence: Sequence) -> None:
        """Inserts what is computed; slots of what another request inserted meanwhile are freed."""
        lock = _held(sequence)
        pages = self.ceil(sequence.kv_tokens)
        self._cache.release(pages - lock.tokens)
        self._cache.insert(lock, sequence.computed())
        self._cache.reserve(pages - lock.tokens)

    def let_go(self, sequence: Sequence) -> None:
        """Frees what is beside the tree and unlocks what is in it, which stays cached."""
        lock = _held(sequence)
        self._cache.release(self.ceil(sequence.kv_tokens) - lock.tokens)
        self._cache.unlock(lock)
        sequence.lock = None


def _held(sequence: Sequence) -> PathLock:
    if sequence.lock is None:
        raise RuntimeError(f"{sequence.request.request_id} holds no slots")
    return sequence.lock
