"""A KV cache as a radix tree over token ids, with locks, injected eviction and a stream of its changes.

Everything is whole pages: of a path's last page, an incomplete one is not cached. The flow of an engine:

    match -> (room?) -> lock -> evict the shortfall -> prefill -> insert the prompt -> insert prompt +
    answer -> unlock

A lookup (`match`) is no access. An access is the admission of a request (`lock`, its cached prefix) and
each `insert` (the whole path so far). Every access happens under a lock, so what it touches cannot be
evicted meanwhile.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Any, NamedTuple

from kvrouting_core.eviction.base import EvictionPolicy, NodeRecord, PathAccess, TreeSite
from kvrouting_core.radix_changes import ChangeSink, HashedNode, PageHasher, PageLedger, StoredPages
from kvrouting_core.radix_tree import TOKEN_BYTES, pack_tokens, put_above, walk

DEFAULT_NAMESPACE = ""
"""Namespace of requests without a LoRA adapter or a cache salt."""


class CacheFullError(RuntimeError):
    """An insert or a reservation needs more tokens than are free; evict first."""


class CacheInUseError(RuntimeError):
    """The cache cannot be cleared while paths are locked."""


class LockReleasedError(RuntimeError):
    """A path lock was used after its unlock."""


class PrefixMatch(NamedTuple):
    """tokens: length of the longest cached prefix. unlocked_tokens: those of them that a lock would take
    out of `evictable_tokens`, so a request of n tokens has room if n − tokens <= free + evictable −
    unlocked_tokens."""

    tokens: int
    unlocked_tokens: int


class CacheNode(HashedNode):
    """locks: path locks that hold this node. record: the policy's, None at a root."""

    __slots__ = ("locks", "record")

    def __init__(self, parent: CacheNode | None, edge: bytearray) -> None:
        super().__init__(parent, edge)
        self.locks = 0
        self.record: Any = None


class _Root(CacheNode):
    """The node of the empty prefix of one namespace."""

    __slots__ = ("namespace",)

    def __init__(self, namespace: Hashable) -> None:
        super().__init__(None, bytearray())
        self.namespace = namespace


class PathLock:
    """Holds the cached part of one request's path; made by `RadixCache.lock`, grown by `insert`, ended by
    `unlock`.
    """

    __slots__ = ("hit_tokens", "namespace", "node", "path")

    def __init__(self, *, namespace: Hashable, node: CacheNode, path: bytes) -> None:
        self.namespace = namespace
        self.node: CacheNode | None = node
        self.path = path
        self.hit_tokens = len(path) // TOKEN_BYTES
        """Tokens that were cached when the lock was taken."""

    @property
    def tokens(self) -> int:
        """Tokens of the path that are held now."""
        return len(self.path) // TOKEN_BYTES


class RadixCache:
    """The cached prefixes of one engine.

    capacity_tokens: B, >= page_size. page_size: tokens, 1..64. policy: bound to this cache alone.
    hasher, changes: see `radix_changes`; without them nothing is hashed or told.
    """

    def __init__(
        self,
        *,
        capacity_tokens: int,
        policy: EvictionPolicy[Any],
        page_size: int = 1,
        hasher: PageHasher | None = None,
        changes: ChangeSink | None = None,
    ) -> None:
        if not 1 <= page_size <= 64:
            raise ValueError(f"page_size must be in 1..64 tokens, got {page_size}")
        if capacity_tokens < page_size:
            raise ValueError(f"capacity_tokens must hold a page of {page_size}, got {capacity_tokens}")
        self._capacity_tokens = capacity_tokens
        self._page_size = page_size
        self._page_bytes = page_size * TOKEN_BYTES
        self._policy = policy
        self._ledger = PageLedger(page_size=page_size, hasher=hasher, sink=changes)
        self._roots: dict[Hashable, _Root] = {}
        self._used = 0
        self._locked = 0
        self._reserved = 0
        policy.attached(
            TreeSite(
                capacity_pages=capacity_tokens // page_size,
                page_tokens=page_size,
                is_locked=lambda node: node.locks > 0,
            )
        )

    @property
    def capacity_tokens(self) -> int:
        """B: tokens that the cache and the reservations may hold together."""
        return self._capacity_tokens

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self._page_size

    @property
    def used_tokens(self) -> int:
        """Tokens in the tree."""
        return self._used // TOKEN_BYTES

    @property
    def locked_tokens(self) -> int:
        """Tokens in the tree that some path lock holds."""
        return self._locked // TOKEN_BYTES

    @property
    def evictable_tokens(self) -> int:
        """Tokens in the tree that no lock holds; all of them can be evicted."""
        return (self._used - self._locked) // TOKEN_BYTES

    @property
    def reserved_tokens(self) -> int:
        """Tokens reserved outside the tree (see `reserve`)."""
        return self._reserved

    @property
    def free_tokens(self) -> int:
        """Tokens that neither the tree nor a reservation holds."""
        return self._capacity_tokens - self.used_tokens - self._reserved

    @property
    def live_pages(self) -> int:
        """Pages in the tree."""
        return self._used // self._page_bytes

    @property
    def digest(self) -> int | None:
        """Sum of the hashes of the live pages mod 2^64, kept incrementally; None without a hasher."""
        return self._ledger.digest

    def snapshot(self) -> Iterator[StoredPages]:
        """Tells of every live page once, parents before children; the cache must not change meanwhile.

        Raises: ValueError if the cache was made without a hasher.
        """
        for namespace, root in self._roots.items():
            pending = list(root.children.values())
            while pending:
                node = pending.pop()
                yield self._ledger.stored_pages(node, namespace)
                pending.extend(node.children.values())

    def match(
        self, tokens: Sequence[int], namespace: Hashable = DEFAULT_NAMESPACE, *, limit_tokens: int | None = None
    ) -> PrefixMatch:
        """Looks up the longest cached prefix; no access, and the tree stays as it is.

        limit_tokens: match at most so many (an engine computes at least the last token itself); None for
        all.
        """
        root = self._roots.get(namespace)
        if root is None:
            return PrefixMatch(0, 0)
        path = self._whole_pages(pack_tokens(tokens), limit_tokens)
        nodes, end, cut = self._walk(root, path, 0)
        unlocked = sum(len(node.edge) for node in nodes if node.locks == 0)
        if cut and nodes[-1].locks == 0:
            unlocked -= len(nodes[-1].edge) - cut
        return PrefixMatch(end // TOKEN_BYTES, unlocked // TOKEN_BYTES)

    def lock(
        self, tokens: Sequence[int], namespace: Hashable = DEFAULT_NAMESPACE, *, limit_tokens: int | None = None
    ) -> PathLock:
        """Admits a request: its longest cached prefix is accessed, and held until `unlock`.

        tokens: the prompt; limit_tokens: as in `match`. Returns the lock; `hit_tokens` says how much was
        cached.
        """
        whole = self._whole_pages(pack_tokens(tokens), None)
        path = self._whole_pages(whole, limit_tokens)
        root = self._root(namespace)
        nodes, end, cut = self._walk(root, path, 0)
        if cut:
            nodes[-1] = self._split(nodes[-1], cut)
        deepest = nodes[-1] if nodes else root
        self._hold(deepest, None)
        lock = PathLock(namespace=namespace, node=deepest, path=path[:end])
        self._policy.admitted(
            PathAccess(
                namespace=namespace,
                tokens=whole,
                pages=len(whole) // self._page_bytes,
                hit_pages=end // self._page_bytes,
                records=[node.record for node in nodes],
            )
        )
        return lock

    def insert(self, lock: PathLock, tokens: Sequence[int]) -> int:
        """Caches a request's path as far as it is computed, and extends the lock over it. An access to the
        whole path.

        tokens: must start with what the lock holds; longer and longer ones for chunked prefill, prompt +
        answer at the end.
        Returns the tokens that were not cached before, whole pages; another request may have inserted some
        meanwhile.
        Raises: CacheFullError if they exceed `free_tokens` (nothing is changed then); ValueError for
        another path; LockReleasedError after `unlock`.
        """
        path = self._whole_pages(pack_tokens(tokens), None)
        if lock.node is None:
            raise LockReleasedError(f"insert of {len(tokens)} tokens on a lock that was released")
        if not path.startswith(lock.path):
            raise ValueError(
                f"insert of {len(tokens)} tokens that do not start with the {lock.tokens} tokens of the lock"
            )
        below, end, cut = self._walk(lock.node, path, len(lock.path))
        new_tokens = (len(path) - end) // TOKEN_BYTES
        if new_tokens > self.free_tokens:
            raise CacheFullError(f"{new_tokens} new tokens, but only {self.free_tokens} are free: evict first")
        if cut:
            below[-1] = self._split(below[-1], cut)
        deepest = below[-1] if below else lock.node
        self._hold(deepest, lock.node)
        if new_tokens:
            deepest = self._grow(deepest, lock.namespace, path, end)
        lock.node, lock.path = deepest, path
        self._policy.inserted(
            PathAccess(
                namespace=lock.namespace,
                tokens=path,
                pages=len(path) // self._page_bytes,
                hit_pages=end // self._page_bytes,
                records=_records_to(deepest),
            )
        )
        return new_tokens

    def unlock(self, lock: PathLock) -> None:
        """Ends a lock. Raises: LockReleasedError the second time."""
        deepest = lock.node
        if deepest is None:
            raise LockReleasedError(f"unlock of a lock on {lock.tokens} tokens that was released before")
        lock.node = None
        node: CacheNode | None = deepest
        while node is not None:
            node.locks -= 1
            if node.locks == 0:
                self._locked -= len(node.edge)
            node = node.parent
        if deepest.locks == 0 and not deepest.children:
            if isinstance(deepest, _Root):
                del self._roots[deepest.namespace]
            else:
                self._policy.evictable(deepest.record)

    def serve(self, tokens: Sequence[int], namespace: Hashable = DEFAULT_NAMESPACE) -> int:
        """One request from admission to end, alone: the sequential process of the paper. Returns the tokens
        hit.

        Raises: CacheFullError if the path does not fit beside what is locked and reserved.
        """
        lock = self.lock(tokens, namespace)
        try:
            missing = len(tokens) // self._page_size * self._page_size - lock.tokens
            if missing > self.free_tokens:
                self.evict(missing - self.free_tokens)
            self.insert(lock, tokens)
        finally:
            self.unlock(lock)
        return lock.hit_tokens

    def evict(self, tokens: int) -> int:
        """Frees at least so many tokens, or all that can be evicted. Returns the tokens freed, whole pages.

        More than asked for is freed by rounding up to pages, and by policies that take whole leaves.
        """
        used = self._used
        for record, pages in self._policy.choose(-(-tokens // self._page_size), self._expose_parent):
            self._cut(record, pages)
        return (used - self._used) // TOKEN_BYTES

    def reserve(self, tokens: int) -> None:
        """Takes free tokens for what a running request holds outside the tree.

        Raises: CacheFullError if fewer are free; ValueError if negative.
        """
        if tokens < 0:
            raise ValueError(f"tokens to reserve must not be negative, got {tokens}")
        if tokens > self.free_tokens:
            raise CacheFullError(f"{tokens} tokens to reserve, but only {self.free_tokens} are free: evict first")
        self._reserved += tokens

    def release(self, tokens: int) -> None:
        """Gives reserved tokens back. Raises: ValueError if more than are reserved, or negative."""
        if not 0 <= tokens <= self._reserved:
            raise ValueError(f"tokens to release must be in 0..{self._reserved}, got {tokens}")
        self._reserved -= tokens

    def clear(self) -> None:
        """Empties the cache; reservations stay. Raises: CacheInUseError while a path is locked."""
        if any(root.locks for root in self._roots.values()):
            raise CacheInUseError(f"cannot clear the cache while {self.locked_tokens} tokens are locked")
        self._roots.clear()
        self._used = 0
        self._policy.clear()
        self._ledger.cleared()

    def _whole_pages(self, packed: bytes, limit_tokens: int | None) -> bytes:
        end = len(packed) if limit_tokens is None else min(len(packed), max(0, limit_tokens) * TOKEN_BYTES)
        end -= end % self._page_bytes
        return packed if end == len(packed) else packed[:end]

    def _root(self, namespace: Hashable) -> _Root:
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = _Root(namespace)
            self._ledger.opened(root, namespace)
        return root

    def _walk(self, node: CacheNode, path: bytes, start: int) -> tuple[list[CacheNode], int, int]:
        return walk(node, path, start, self._page_bytes)

    def _split(self, node: CacheNode, cut: int) -> CacheNode:
        """Makes the first `cut` bytes of a node's edge a node of their own, and returns it."""
        upper = CacheNode(None, bytearray())
        put_above(node, upper, cut, self._page_bytes)
        upper.locks = node.locks
        upper.record = self._policy.split(node.record, upper, cut // self._page_bytes)
        self._ledger.split(upper, node)
        return upper

    def _grow(self, parent: CacheNode, namespace: Hashable, path: bytes, start: int) -> CacheNode:
        """Hangs path[start:] on a locked node as a new leaf, locked once, and returns it."""
        node = CacheNode(parent, bytearray(path[start:]))
        node.locks = 1
        node.record = self._policy.record(node, (len(path) - start) // self._page_bytes)
        parent.children[path[start : start + self._page_bytes]] = node
        self._used += len(node.edge)
        self._locked += len(node.edge)
        self._ledger.stored(node, namespace, start // TOKEN_BYTES)
        return node

    def _hold(self, deepest: CacheNode, held: CacheNode | None) -> None:
        """Locks the nodes from `deepest` up to, not including, the one that this lock holds already."""
        if deepest.locks == 0 and not deepest.children and deepest.parent is not None and deepest is not held:
            self._policy.pinned(deepest.record)
        node: CacheNode | None = deepest
        while node is not None and node is not held:
            if node.locks == 0:
                self._locked += len(node.edge)
            node.locks += 1
            node = node.parent

    def _expose_parent(self, record: NodeRecord) -> NodeRecord | None:
        """Takes a leaf that is wholly chosen off its parent; returns the parent's record if that is now
        evictable.
        """
        node: CacheNode = record.owner
        parent: CacheNode = node.parent
        del parent.children[bytes(node.edge[: self._page_bytes])]
        if parent.children or parent.locks or parent.parent is None:
            return None
        exposed: NodeRecord = parent.record
        return exposed

    def _cut(self, record: NodeRecord, pages: int) -> None:
        """Removes the last pages of a leaf, or all of it once `_expose_parent` has taken it off."""
        node: CacheNode = record.owner
        size = pages * self._page_bytes
        self._used -= size
        if node.hashes is not None:
            self._ledger.removed(node, pages)
        if pages < record.pages:
            del node.edge[-size:]
            self._policy.trimmed(record, pages)
            return
        record.owner = None
        root = node.parent
        if isinstance(root, _Root) and not root.children and not root.locks:
            self._roots.pop(root.namespace, None)


def _records_to(node: CacheNode) -> list[NodeRecord]:
    """The records from the root's child down to a node."""
    records: list[NodeRecord] = []
    while node.parent is not None:
        records.append(node.record)
        node = node.parent
    records.reverse()
    return records
