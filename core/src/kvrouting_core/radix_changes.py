"""The stream of changes of a radix cache: pages stored, removed, cleared, with their chained hashes.

Everything a KV event needs, and nothing of its wire form. A page's hash stands for the page and all before
it, so one hash names one prefix. The hash function is injected; the cache never hashes by itself.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvrouting_core.radix_tree import TOKEN_BYTES, TreeNode, unpack_tokens

_MASK = 2**64 - 1


class PageHasher(Protocol):
    """Chained 64-bit hashes of pages, with a 64-bit state carried from page to page."""

    def root(self, namespace: Any, /) -> int:
        """Returns the state before the first page of a namespace, which is what `RadixCache.lock` was given
        as such.
        """

    def extend(self, state: int, position: int, tokens: Sequence[int], /) -> tuple[Iterable[int], Iterable[int]]:
        """Returns the hashes of the pages in `tokens`, and the states after each of them.

        state: after the page that ends at `position`. position: tokens before these ones, whole pages.
        tokens: whole pages.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPages:
    """Consecutive pages of one path that became cached together.

    parent_hash: hash of the page before the first one, None at a root. hashes: one per page, unsigned
    64-bit, in order (length n >= 1). tokens: their ids, `array("I")` of n · page_size. namespace: of the
    path.
    """

    namespace: Hashable
    parent_hash: int | None
    hashes: array[int]
    tokens: array[int]
    page_size: int

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.hashes) * self.page_size:
            raise ValueError(f"{len(self.hashes)} pages of {self.page_size} do not have {len(self.tokens)} tokens")


class ChangeSink(Protocol):
    """Hears of every change of the cached set, in order, after it has happened."""

    def stored(self, pages: StoredPages, /) -> None:
        """These pages are cached from now on; their parent is."""

    def removed(self, hashes: array[int], /) -> None:
        """These pages are no longer cached: the tail of one leaf, or all of it; in path order."""

    def cleared(self) -> None:
        """No page is cached any more."""


class HashedNode(TreeNode):
    """hashes: one per page of the edge; states: the hasher's state after each of them. Both None without a
    hasher.

    A root has no hashes and one state, that of its namespace.
    """

    __slots__ = ("hashes", "states")

    def __init__(self, parent: HashedNode | None, edge: bytearray) -> None:
        super().__init__(parent, edge)
        self.hashes: array[int] | None = None
        self.states: array[int] | None = None


class PageLedger:
    """Keeps the hashes of the nodes, the order-independent digest of all live pages, and tells the sink.

    Without a hasher it does nothing.
    """

    def __init__(self, *, page_size: int, hasher: PageHasher | None, sink: ChangeSink | None) -> None:
        if sink is not None and hasher is None:
            raise ValueError("a change sink needs page hashes: give a hasher too")
        self._page_size = page_size
        self._hasher = hasher
        self._sink = sink
        self._digest = 0

    @property
    def digest(self) -> int | None:
        """Sum of the hashes of all live pages mod 2^64; None without a hasher."""
        return None if self._hasher is None else self._digest

    def opened(self, root: HashedNode, namespace: Hashable) -> None:
        """A root for the namespace was made."""
        if self._hasher is not None:
            root.hashes = array("Q")
            root.states = array("Q", [self._hasher.root(namespace)])

    def stored(self, node: HashedNode, namespace: Hashable, position: int) -> None:
        """A new node hangs on its parent. position: tokens of the path before the node."""
        if self._hasher is None:
            return
        hashes, states = self._hasher.extend(node.parent.states[-1], position, unpack_tokens(node.edge))
        node.hashes = array("Q", hashes)
        node.states = array("Q", states)
        self._digest = (self._digest + sum(node.hashes)) & _MASK
        if self._sink is not None:
            self._sink.stored(self.stored_pages(node, namespace))

    def split(self, upper: HashedNode, node: HashedNode) -> None:
        """`upper` has taken over the first part of the node's edge."""
        if node.hashes is not None and node.states is not None:
            pages = len(node.hashes) - len(node.edge) // (self._page_size * TOKEN_BYTES)
            upper.hashes, upper.states = node.hashes[:pages], node.states[:pages]
            del node.hashes[:pages], node.states[:pages]

    def removed(self, node: HashedNode, pages: int) -> None:
        """The last pages of a node, or all, are being cut."""
        if node.hashes is None or node.states is None:
            return
        gone = node.hashes[-pages:]
        del node.hashes[-pages:], node.states[-pages:]
        self._digest = (self._digest - sum(gone)) & _MASK
        if self._sink is not None:
            self._sink.removed(gone)

    def cleared(self) -> None:
        """All nodes are gone."""
        self._digest = 0
        if self._sink is not None:
            self._sink.cleared()

    def stored_pages(self, node: HashedNode, namespace: Hashable) -> StoredPages:
        """The record that tells of a live node's pages. Raises: ValueError without a hasher."""
        if node.hashes is None:
            raise ValueError("the cache was made without a hasher, so its pages have no hashes")
        parent_hashes = node.parent.hashes
        return StoredPages(
            namespace=namespace,
            parent_hash=parent_hashes[-1] if parent_hashes else None,
            hashes=node.hashes[:],
            tokens=unpack_tokens(node.edge),
            page_size=self._page_size,
        )
