"""The unit of all bookkeeping, a block: the pages of 64 tokens of a path, or one page where pages are that long.

A block is named by a hash of the path up to its end, so that one name stands for one prefix. What a path has
beyond its last whole block is named as well and counts as one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from kvrouting_core.eviction.base import NodeRecord, PathAccess

BLOCK_TOKENS = 64


def pages_per_block(page_tokens: int) -> int:
    """Pages of a block, >= 1."""
    return max(1, BLOCK_TOKENS // page_tokens)


class BlockRecord(NodeRecord):
    """What is kept about a tree node.

    start, end: pages of the path before the node, and up to its end as far as it is not chosen for eviction.
    names: of the blocks that end in the node, in path order; with `has_partial_block` also of the
        incomplete one with which a path ended here.
    labels: one byte for each name, for the victim rule. rest_label: of a tail without a name, which is what remains of
        a block that was cut or split. tail_label: of the last block, or of what remains of it.
    accessed: the rule's time of the last admission that used the node, or of its load.
    is_named: whether the load of the node was told. had_child: whether the node ever had a child. branched: whether a
        path left here after that.
    pool_index, fallback_index: in the pools of evictable leaves (see `LeafPool`, `FallbackPool`); -1: not there.
    """

    __slots__ = (
        "accessed",
        "branched",
        "end",
        "fallback_index",
        "had_child",
        "has_partial_block",
        "is_named",
        "labels",
        "names",
        "pool_index",
        "rest_label",
        "start",
        "tail_label",
    )

    def __init__(self, owner: Any, pages: int) -> None:
        super().__init__(owner, pages)
        self.start = 0
        self.end = pages
        self.names: list[int] = []
        self.labels = bytearray()
        self.has_partial_block = False
        self.rest_label = 0
        self.tail_label = 0
        self.accessed = 0
        self.is_named = False
        self.had_child = False
        self.branched = False
        self.pool_index = -1
        self.fallback_index = -1

    def tail_name(self, block_pages: int) -> int | None:
        """Name of the block that the node's last page ends; None if that page ends none."""
        if self.names and (self.has_partial_block or self.end % block_pages == 0):
            return self.names[-1]
        return None

    def relabel(self, table: bytes) -> None:
        """table: old label → new label."""
        self.labels = self.labels.translate(table)
        self.rest_label = table[self.rest_label]
        self.tail_label = table[self.tail_label]

    def extend(self, names: Sequence[int], labels: bytes) -> None:
        """Names the next blocks of the node, at least one."""
        self.names += names
        self.labels += labels
        self.tail_label = labels[-1]

    def tail_pages(self, block_pages: int) -> int:
        """Pages of the last block that lie in the node, 1..block_pages."""
        tail = self.end % block_pages or block_pages
        return min(tail, self.end - self.start)

    def shorten(self, pages: int, block_pages: int) -> list[tuple[int, int]]:
        """Takes pages off the tail. Returns (name, label) of the blocks that are no longer whole, deepest first."""
        names, labels = self.names, self.labels
        lost: list[tuple[int, int]] = []
        if self.has_partial_block:
            lost.append((names.pop(), labels.pop()))
            self.has_partial_block = False
        self.end = end = self.end - pages
        kept = end // block_pages - self.start // block_pages
        while len(names) > kept:
            lost.append((names.pop(), labels.pop()))
        if lost:
            self.rest_label = lost[-1][1]
            self.tail_label = labels[-1] if labels else self.rest_label
        return lost

    def split_off(self, prefix_owner: Any, prefix_pages: int, block_pages: int) -> BlockRecord:
        """Makes the first pages a record of their own, the parent of this one."""
        upper = BlockRecord(prefix_owner, prefix_pages)
        cut = self.start + prefix_pages
        count = cut // block_pages - self.start // block_pages if self.is_named else 0
        upper.start, upper.end = self.start, cut
        upper.names, self.names = self.names[:count], self.names[count:]
        upper.rest_label = self.labels[count] if count < len(self.labels) else self.rest_label
        upper.labels, self.labels = self.labels[:count], self.labels[count:]
        upper.tail_label = upper.labels[-1] if upper.labels else upper.rest_label
        upper.accessed = self.accessed
        upper.is_named = self.is_named
        upper.had_child = True
        self.start = cut
        self.pages -= prefix_pages
        return upper


class BlockNames:
    """Names the blocks of paths: a chain of 64-bit hashes, each over the name before and the block's tokens."""

    def __init__(self, block_pages: int) -> None:
        self._block_pages = block_pages
        self._latest: tuple[Any, bytes, list[int]] | None = None

    def of_path(self, access: PathAccess[BlockRecord]) -> list[int]:
        """One name for each block of a path, the incomplete last one included.

        What the records of the cached part know is not hashed again.
        """
        latest = self._latest
        if latest is not None and latest[1] == access.tokens and latest[0] == access.namespace:
            return latest[2]
        names = self._known(access.records)
        if access.pages:
            self._hash_rest(names, access)
        self._latest = (access.namespace, access.tokens, names)
        return names

    def _known(self, records: Sequence[BlockRecord]) -> list[int]:
        known: list[int] = []
        for record in records:
            if not record.is_named:
                break
            known += record.names[:-1] if record.has_partial_block else record.names
        return known

    def _hash_rest(self, names: list[int], access: PathAccess[BlockRecord]) -> None:
        tokens = access.tokens
        size = len(tokens) // access.pages * self._block_pages
        blake2b, from_bytes = hashlib.blake2b, int.from_bytes
        if names:
            name = names[-1].to_bytes(8, "little")
        else:
            name = blake2b(repr(access.namespace).encode(), digest_size=8).digest()
        for start in range(len(names) * size, len(tokens), size):
            name = blake2b(tokens[start : start + size], digest_size=8, salt=name).digest()
            names.append(from_bytes(name, "little"))
