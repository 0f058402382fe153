"""What chooses among the leaves that may go; any such rule keeps the guarantee of the frame around it."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvrouting_core.eviction.adaptive.block_records import BlockRecord
from kvrouting_core.eviction.adaptive.leaf_pool import LeafPool


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """A request's use of a path.

    names: of its blocks. hit: leading ones that were cached. records: of the cached part, root side first.
    block_tokens, block_pages: of a whole block. in_ghost: names that the ghost held before the visit.
    """

    names: Sequence[int]
    hit: int
    records: Sequence[BlockRecord]
    block_tokens: int
    block_pages: int
    in_ghost: Container[int]


class VictimRule(Protocol):
    """Hears of uses, loads and evictions, labels blocks with one byte each, and picks victims."""

    @property
    def now(self) -> int:
        """The rule's time; records get it when they are accessed."""

    def sized(self, capacity: int) -> None:
        """Capacity of the cache in blocks, >= 1; told once, before all else."""

    def admitted(self, visit: Visit) -> bytes:
        """A request was admitted; may relabel the records. Returns the labels of the names that were not hit."""

    def extended(self, visit: Visit) -> bytes:
        """A path was loaded further than any admission announced, by an answer. Returns labels as `admitted`."""

    def evicted(self, name: int, label: int, *, memory: int) -> None:
        """A block left the cache. memory: how many evicted names may be remembered in all, >= 0."""

    def pick(self, pool: LeafPool) -> BlockRecord:
        """One of the leaves, of which there is at least one."""

    def clear(self) -> None:
        """The cache was emptied; what was learned stays."""
