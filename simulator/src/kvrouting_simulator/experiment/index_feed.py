"""From a cache's changes to the router's index, as sidecar and sync stream do it.

`MirrorFeed` takes the product's own way: page hashes, TreeMirror, deltas. `BlockEndFeed` gives the same blocks at a
fraction of the work, where pages divide blocks: the chain hash after a token does not depend on the block size, so the
cache's pages that end a block carry that block's hash, and all others carry none. A test proves both equal.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvrouting_core.blocks import ChainHasher, Namespace, to_signed
from kvrouting_core.deltas import Clear, Delta, Extend, Trim
from kvrouting_core.identity import WorkerId
from kvrouting_core.prefix_index import PrefixIndex
from kvrouting_core.radix_changes import ChangeSink, PageHasher, StoredPages
from kvrouting_core.tree_mirror import TreeMirror

_KEY = b"kvrouting simulation"  # the prompts of a simulation have no author to hide from


def block_hasher(block_tokens: int) -> ChainHasher:
    """The pool's hash of routing blocks."""
    return ChainHasher(_KEY, block_tokens)


class IndexFeed(Protocol):
    """Collects the changes of one cache. hasher, sink: what the cache is made with."""

    @property
    def hasher(self) -> PageHasher:
        """Hashes the cache's pages."""

    @property
    def sink(self) -> ChangeSink:
        """Hears of the cache's changes."""

    def drain(self) -> list[Delta]:
        """The deltas since the last call, in order."""


def apply_deltas(index: PrefixIndex, worker: WorkerId, deltas: Sequence[Delta]) -> None:
    """Carries deltas into the index."""
    for delta in deltas:
        if isinstance(delta, Extend):
            index.add(worker, delta.blocks)
        elif isinstance(delta, Trim):
            index.remove(worker, delta.blocks)
        else:
            index.clear(worker)


def index_feed(*, page_size: int, blocks: ChainHasher, namespace: Namespace) -> IndexFeed:
    """The cheapest feed that is right for these sizes. blocks: hasher of the routing blocks."""
    if blocks.block_size % page_size == 0:
        return BlockEndFeed(page_size=page_size, blocks=blocks)
    return MirrorFeed(page_size=page_size, blocks=blocks, namespace=namespace)


class MirrorFeed:
    """The product's way, for any sizes."""

    def __init__(self, *, page_size: int, blocks: ChainHasher, namespace: Namespace) -> None:
        self._hasher = ChainHasher(b"hash of the engine's pages", page_size)
        self._page_size = page_size
        self._mirror = TreeMirror(hasher=blocks, model=namespace.model, exact=True)
        self._deltas: list[Delta] = []

    @property
    def hasher(self) -> PageHasher:
        return self._hasher

    @property
    def sink(self) -> ChangeSink:
        return self

    def drain(self) -> list[Delta]:
        deltas, self._deltas = self._deltas, []
        return deltas

    def stored(self, pages: StoredPages, /) -> None:
        parent = None if pages.parent_hash is None else to_signed(pages.parent_hash)
        self._deltas += self._mirror.stored(parent, _signed(pages.hashes), pages.tokens, page_size=self._page_size)

    def removed(self, hashes: array[int], /) -> None:
        self._deltas += self._mirror.removed(_signed(hashes))

    def cleared(self) -> None:
        self._deltas += self._mirror.cleared()


class BlockEndFeed:
    """Page size 1..block size, dividing it: hasher and sink of the cache in one."""

    def __init__(self, *, page_size: int, blocks: ChainHasher) -> None:
        if blocks.block_size % page_size:
            raise ValueError(f"page size {page_size} does not divide block size {blocks.block_size}")
        self._page_size = page_size
        self._blocks = blocks
        self._deltas: list[Delta] = []

    @property
    def hasher(self) -> PageHasher:
        return self

    @property
    def sink(self) -> ChangeSink:
        return self

    def drain(self) -> list[Delta]:
        deltas, self._deltas = self._deltas, []
        return deltas

    def root(self, namespace: Hashable, /) -> int:
        if not isinstance(namespace, Namespace):
            raise TypeError(f"namespace must be a Namespace, got {namespace!r}")
        return self._blocks.root(namespace)

    def extend(self, state: int, position: int, tokens: Sequence[int], /) -> tuple[array[int], array[int]]:
        """Hash 0 for a page that ends no block: no block has it but by a chance of 2^-64."""
        page, block = self._page_size, self._blocks.block_size
        states = self._blocks.states(state, position, tokens)[page - 1 :: page]
        hashes = np.zeros(len(states), dtype=np.uint64)
        ends = slice((block - position % block) // page - 1, None, block // page)
        hashes[ends] = self._blocks.finalize(states[ends])
        return _words(hashes), _words(states)

    def stored(self, pages: StoredPages, /) -> None:
        blocks = _nonzero(pages.hashes)
        if blocks:
            # The parent block is not looked at by an index of prefix-closed sets.
            self._deltas.append(Extend(parent=None, blocks=blocks))

    def removed(self, hashes: array[int], /) -> None:
        blocks = _nonzero(hashes)
        if blocks:
            self._deltas.append(Trim(blocks=blocks))

    def cleared(self) -> None:
        self._deltas.append(Clear())


def _words(values: npt.NDArray[np.uint64]) -> array[int]:
    return array("Q", values.tobytes())


def _signed(hashes: array[int]) -> array[int]:
    """As an engine's events carry them."""
    return array("q", hashes.tobytes())


def _nonzero(hashes: array[int]) -> tuple[int, ...]:
    if len(hashes) < 32:
        return tuple(h for h in hashes if h)
    values = np.frombuffer(hashes, dtype=np.uint64)
    return tuple(values[values != 0].tolist())
