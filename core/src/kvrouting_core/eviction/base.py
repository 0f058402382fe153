"""What an eviction policy is told about a radix tree, and what it answers.

The policy does not own the tree. It keeps one record per tree node and hears, through hooks, what happens
to the nodes; asked to free pages, it names leaves and how many pages to cut from the tail of each. The same
policy object therefore serves `RadixCache`, and any other radix tree whose owner calls the hooks.

Terms. Unit of everything: page. A node's edge holds a run of pages. A node is *evictable* when it has no
children and is not locked. A path is the pages of one request from the root on.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar


class NodeRecord:
    """What a policy keeps about one tree node; policies extend it.

    owner: the tree's node, never looked into by a policy; None once the node is gone.
    pages: pages on the node's edge, >= 1, kept current by the hooks `split` and `trimmed`.
    """

    __slots__ = ("owner", "pages")

    def __init__(self, owner: Any, pages: int) -> None:
        self.owner = owner
        self.pages = pages


R = TypeVar("R", bound=NodeRecord)

ExposeParent = Callable[[Any], Any]
"""Given by the tree to `choose`: takes the record of a leaf all of whose pages are chosen, and returns the
record of its parent if that has now become an evictable leaf, else None. To be called once per wholly
chosen leaf, at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PathAccess(Generic[R]):
    """One access to a path: the admission of a request, or the insert of what it has loaded.

    namespace: names the tree's root; paths of different namespaces share nothing.
    tokens: the path's whole pages, packed as unsigned 32-bit integers in machine order (see `pack_tokens`).
    pages: whole pages of the path. hit_pages: leading ones that were cached before this access, 0..pages.
    records: of the cached part, root side first; at an insert that is the whole path, new nodes included.
    """

    namespace: Hashable
    tokens: bytes
    pages: int
    hit_pages: int
    records: Sequence[R]

    def __post_init__(self) -> None:
        if not 0 <= self.hit_pages <= self.pages:
            raise ValueError(f"hit_pages must be in 0..{self.pages}, got {self.hit_pages}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeSite:
    """The tree that a policy serves.

    capacity_pages: that the tree can hold, >= 1. page_tokens: tokens per page. is_locked: whether a running request
    holds a node, given the owner of its record.
    """

    capacity_pages: int
    page_tokens: int
    is_locked: Callable[[Any], bool]

    def __post_init__(self) -> None:
        for name in ("capacity_pages", "page_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


class EvictionPolicy(ABC, Generic[R]):
    """Chooses which tails of which leaves to evict.

    The tree calls the hooks in the order in which things happen. `record` and `split` make records;
    `evictable` and `pinned` alternate for each record; a record starts out pinned. Same seed and same calls
    give the same choices.
    """

    def attached(self, site: TreeSite) -> None:  # noqa: ARG002 - for those that override it
        """Told once, before all else; most policies need to know nothing of it."""
        return

    @abstractmethod
    def record(self, owner: Any, pages: int) -> R:
        """Returns the record of a new node; the node is not evictable until `evictable` says so."""

    @abstractmethod
    def admitted(self, access: PathAccess[R]) -> None:
        """A request was admitted; the records are those of its cached prefix, which is accessed now."""

    @abstractmethod
    def inserted(self, access: PathAccess[R]) -> None:
        """A request has loaded its path so far; the records are those of the whole path, which is accessed
        now.
        """

    @abstractmethod
    def split(self, record: R, prefix_owner: Any, prefix_pages: int) -> R:
        """The first pages of a node became a node of their own, its parent. Returns the record of the new
        node.

        `record` stays with the rest of the node, and evictable if it was; the new node has a child, so it
        is pinned.
        """

    def trimmed(self, record: R, pages: int) -> None:
        """So many pages, fewer than it has, were cut from the node's tail, chosen by this policy or not."""
        record.pages -= pages

    @abstractmethod
    def evictable(self, record: R) -> None:
        """The node became an unlocked leaf."""

    @abstractmethod
    def pinned(self, record: R) -> None:
        """The node is no longer an unlocked leaf: it got a child or a lock, or was removed by someone else."""

    @abstractmethod
    def choose(self, pages: int, expose_parent: ExposeParent) -> list[tuple[R, int]]:
        """Names the pages to evict: (record, pages to cut from its tail), every record at most once,
        children first.

        The sum reaches `pages` unless fewer are evictable; it exceeds `pages` only for policies that take
        whole leaves. The tree must carry out all of it at once. The policy has already let go of the wholly
        taken records (no `pinned` follows) and has taken in the exposed parents (no `evictable` follows);
        for a partly taken one the tree calls `trimmed`.
        """

    @abstractmethod
    def clear(self) -> None:
        """Every node is gone at once; what was learned about the future or the coins stays."""
