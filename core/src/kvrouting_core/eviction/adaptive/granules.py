"""The unit of all bookkeeping, a granule: the pages of 64 tokens of a path, or one page where pages are that long.

A granule is named by a hash of the path up to its end, so that one name stands for one prefix. What a path has
beyond its last whole granule is named as well and counts as one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from kvrouting_core.eviction.base import NodeRecord, PathAccess

GRANULE_TOKENS = 64


def pages_per_granule(page_tokens: int) -> int:
    """Pages of a granule, >= 1."""
    return max(1, GRANULE_TOKENS // page_tokens)


class GranuleRecord(NodeRecord):
    """What is kept about a tree node.

    start, end: pages of the path before the node, and up to its end as far as it is not chosen for eviction.
    names: of the granules that end in the node, in path order; with `crumb` also of the incomplete one with which a
        path ended here.
    labels: one byte for each name, for the victim rule. rest_label: of a tail without a name, which is what remains of
        a granule that was cut or split. tail_label: of the last granule, or of what remains of it.
    accessed: the rule's time of the last admission that used the node, or of its load.
    is_named: whether the load of the node was told. had_child: whether the node ever had a child. branched: whether a
        path left here after that.
    place, spare_place: in the pools of evictable leaves (see `LeafPool`, `SparePool`); -1: not there.
    """

    __slots__ = (
        "accessed",
        "branched",
        "crumb",
        "end",
        "had_child",
        "is_named",
        "labels",
        "names",
        "place",
        "rest_label",
        "spare_place",
        "start",
        "tail_label",
    )

    def __init__(self, owner: Any, pages: int) -> None:
        super().__init__(owner, pages)
        self.start = 0
        self.end = pages
        self.names: list[int] = []
        self.labels = bytearray()
        self.crumb = False
        self.rest_label = 0
        self.tail_label = 0
        self.accessed = 0
        self.is_named = False
        self.had_child = False
        self.branched = False
        self.place = -1
        self.spare_place = -1

    def tail_name(self, granule_pages: int) -> int | None:
        """Name of the granule that the node's last page ends; None if that page ends none."""
        if self.names and (self.crumb or self.end % granule_pages == 0):
            return self.names[-1]
        return None

    def relabel(self, table: bytes) -> None:
        """table: old label → new label."""
        self.labels = self.labels.translate(table)
        self.rest_label = table[self.rest_label]
        self.tail_label = table[self.tail_label]

    def extend(self, names: Sequence[int], labels: bytes) -> None:
        """Names the next granules of the node, at least one."""
        self.names += names
        self.labels += labels
        self.tail_label = labels[-1]

    def tail_pages(self, granule_pages: int) -> int:
        """Pages of the last granule that lie in the node, 1..granule_pages."""
        tail = self.end % granule_pages or granule_pages
        return min(tail, self.end - self.start)

    def shorten(self, pages: int, granule_pages: int) -> list[tuple[int, int]]:
        """Takes pages off the tail. Returns (name, label) of the granules that are no longer whole, deepest first."""
        names, labels = self.names, self.labels
        lost: list[tuple[int, int]] = []
        if self.crumb:
            lost.append((names.pop(), labels.pop()))
            self.crumb = False
        self.end = end = self.end - pages
        kept = end // granule_pages - self.start // granule_pages
        while len(names) > kept:
            lost.append((names.pop(), labels.pop()))
        if lost:
            self.rest_label = lost[-1][1]
            self.tail_label = labels[-1] if labels else self.rest_label
        return lost

    def split_off(self, prefix_owner: Any, prefix_pages: int, granule_pages: int) -> GranuleRecord:
        """Makes the first pages a record of their own, the parent of this one."""
        upper = GranuleRecord(prefix_owner, prefix_pages)
        cut = self.start + prefix_pages
        count = cut // granule_pages - self.start // granule_pages if self.is_named else 0
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


class GranuleNames:
    """Names the granules of paths: a chain of 64-bit hashes, each over the name before and the granule's tokens."""

    def __init__(self, granule_pages: int) -> None:
        self._granule_pages = granule_pages
        self._latest: tuple[Any, bytes, list[int]] | None = None

    def of_path(self, access: PathAccess[GranuleRecord]) -> list[int]:
        """One name for each granule of a path, the incomplete last one included.

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

    def _known(self, records: Sequence[GranuleRecord]) -> list[int]:
        known: list[int] = []
        for record in records:
            if not record.is_named:
                break
            known += record.names[:-1] if record.crumb else record.names
        return known

    def _hash_rest(self, names: list[int], access: PathAccess[GranuleRecord]) -> None:
        tokens = access.tokens
        size = len(tokens) // access.pages * self._granule_pages
        blake2b, from_bytes = hashlib.blake2b, int.from_bytes
        if names:
            name = names[-1].to_bytes(8, "little")
        else:
            name = blake2b(repr(access.namespace).encode(), digest_size=8).digest()
        for start in range(len(names) * size, len(tokens), size):
            name = blake2b(tokens[start : start + size], digest_size=8, salt=name).digest()
            names.append(from_bytes(name, "little"))
