"""The radix cache by its definition: one page per node in a set of prefixes, everything found by looking at all pages.

Slow and obvious. It does not choose victims; it says which choices are right.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

from kvrouting_core.radix_changes import StoredPages

Prefix = tuple[Hashable, tuple[int, ...]]
"""A cached page, named by its namespace and all tokens from the root to its end."""


@dataclass(slots=True, kw_only=True)
class Page:
    """locks: requests that hold it; access: number of its last access; hits: requests that loaded or found it."""

    locks: int = 0
    access: int = 0
    hits: int = 0


@dataclass(slots=True, kw_only=True)
class HeldPath:
    """A request's lock, as the definition sees it."""

    namespace: Hashable
    held: list[Prefix]


@dataclass(slots=True, kw_only=True)
class CacheByDefinition:
    """pages: what is cached; marked: the distinct pages that RLT has marked in this phase."""

    page_size: int
    pages: dict[Prefix, Page] = field(default_factory=dict)
    marked: set[Prefix] = field(default_factory=set)
    accesses: int = 0

    def prefixes(self, tokens: Sequence[int], namespace: Hashable) -> list[Prefix]:
        """The whole pages of a path."""
        ends = range(self.page_size, len(tokens) + 1, self.page_size)
        return [(namespace, tuple(tokens[:end])) for end in ends]

    def cached(self, tokens: Sequence[int], namespace: Hashable) -> list[Prefix]:
        """The cached pages of a path; they are its first ones."""
        return [prefix for prefix in self.prefixes(tokens, namespace) if prefix in self.pages]

    def lock(self, tokens: Sequence[int], namespace: Hashable) -> HeldPath:
        lock = HeldPath(namespace=namespace, held=[])
        self._hold(lock, self.cached(tokens, namespace))
        for prefix in lock.held:
            self.pages[prefix].hits += 1
        self._access(lock.held)
        return lock

    def insert(self, lock: HeldPath, tokens: Sequence[int]) -> int:
        """Returns the tokens that were not cached."""
        path = self.prefixes(tokens, lock.namespace)
        new = [prefix for prefix in path if prefix not in self.pages]
        for prefix in new:
            self.pages[prefix] = Page(hits=1)
        self._hold(lock, path[len(lock.held) :])
        self._access(path)
        return len(new) * self.page_size

    def unlock(self, lock: HeldPath) -> None:
        for prefix in lock.held:
            self.pages[prefix].locks -= 1

    def remove(self, gone: Iterable[Prefix]) -> None:
        for prefix in gone:
            del self.pages[prefix]

    def unlocked(self) -> set[Prefix]:
        """The pages that can be evicted, sooner or later: no locked page is below an unlocked one."""
        return {prefix for prefix, page in self.pages.items() if page.locks == 0}

    def drawable(self) -> set[Prefix]:
        """The pages that RLT may evict within its phase: unlocked and unmarked, as are all pages below them."""
        keepers = [prefix for prefix, page in self.pages.items() if page.locks or prefix in self.marked]
        return {
            prefix
            for prefix in self.pages
            if not any(keeper[0] == prefix[0] and keeper[1][: len(prefix[1])] == prefix[1] for keeper in keepers)
        }

    def has_child(self, prefix: Prefix) -> bool:
        """Whether a page right below is cached."""
        longer = len(prefix[1]) + self.page_size
        return any(
            other[0] == prefix[0] and len(other[1]) == longer and other[1][: len(prefix[1])] == prefix[1]
            for other in self.pages
        )

    def _hold(self, lock: HeldPath, prefixes: list[Prefix]) -> None:
        lock.held += prefixes
        for prefix in prefixes:
            self.pages[prefix].locks += 1

    def _access(self, prefixes: list[Prefix]) -> None:
        self.accesses += 1
        for prefix in prefixes:
            self.pages[prefix].access = self.accesses
        self.marked.update(prefixes)


class BlakeHasher:
    """A page hasher that hashes page by page; the state is the hash of the page before."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size

    def root(self, namespace: Hashable) -> int:
        return self._word(repr(namespace).encode())

    def extend(self, state: int, position: int, tokens: Sequence[int]) -> tuple[list[int], list[int]]:
        hashes = []
        for first in range(0, len(tokens), self._page_size):
            page = array("I", tokens[first : first + self._page_size])
            state = self._word(f"{state} {position + first} ".encode() + page.tobytes())
            hashes.append(state)
        return [value ^ 1 for value in hashes], hashes

    @staticmethod
    def _word(data: bytes) -> int:
        return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


class MirroringSink:
    """Rebuilds the cached set from the stream of changes alone. removals: the removed runs since the last `take`."""

    def __init__(self) -> None:
        self.live: dict[int, Prefix] = {}
        self.clears = 0
        self._removals: list[list[Prefix]] = []

    def stored(self, pages: StoredPages) -> None:
        for page_hash, prefix in prefixes_of(pages, self.live).items():
            assert page_hash not in self.live
            self.live[page_hash] = prefix

    def removed(self, hashes: array[int]) -> None:
        assert len(hashes) > 0
        self._removals.append([self.live.pop(page_hash) for page_hash in hashes])

    def cleared(self) -> None:
        self.live.clear()
        self.clears += 1

    def take(self) -> list[list[Prefix]]:
        taken, self._removals = self._removals, []
        return taken


def prefixes_of(pages: StoredPages, known: dict[int, Prefix]) -> dict[int, Prefix]:
    """What each hash of the record stands for; the parent must be known and of the same namespace."""
    before: tuple[int, ...] = ()
    if pages.parent_hash is not None:
        namespace, before = known[pages.parent_hash]
        assert namespace == pages.namespace
    ends = range(pages.page_size, len(pages.tokens) + 1, pages.page_size)
    return {
        page_hash: (pages.namespace, before + tuple(pages.tokens[:end]))
        for page_hash, end in zip(pages.hashes, ends, strict=True)
    }
