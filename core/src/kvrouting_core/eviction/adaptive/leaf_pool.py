"""Leaves in arrays with swap-remove, beside each leaf what a victim rule compares, and the place of each leaf in it."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import overload

from kvrouting_core.eviction.adaptive.block_records import BlockRecord


class LeafPool(Sequence[BlockRecord]):
    """A record lies in at most one pool of each class: it holds its own place there, -1 for none.

    leaves: in an order that the calls alone decide. accessed, labels: of each leaf `accessed` and `tail_label`, copied
    here because a choice reads those of many leaves, and the records lie scattered over the memory. Not to be changed
    from outside.
    """

    def __init__(self) -> None:
        self.leaves: list[BlockRecord] = []
        self.accessed = array("q")
        self.labels = bytearray()

    def __len__(self) -> int:
        return len(self.leaves)

    def __iter__(self) -> Iterator[BlockRecord]:
        return iter(self.leaves)

    @overload
    def __getitem__(self, pool_index: int) -> BlockRecord: ...

    @overload
    def __getitem__(self, pool_index: slice) -> Sequence[BlockRecord]: ...

    def __getitem__(self, pool_index: int | slice) -> BlockRecord | Sequence[BlockRecord]:
        return self.leaves[pool_index]

    def has(self, leaf: BlockRecord) -> bool:
        """Whether a leaf is in."""
        return leaf.pool_index >= 0

    def add(self, leaf: BlockRecord) -> None:
        """Takes in a leaf that is not in."""
        leaf.pool_index = len(self.leaves)
        self._append(leaf)

    def remove(self, leaf: BlockRecord) -> None:
        """Lets go of a leaf that is in."""
        pool_index, leaf.pool_index = leaf.pool_index, -1
        last = self._pop_into(pool_index, leaf)
        if last is not None:
            last.pool_index = pool_index

    def refresh(self, leaf: BlockRecord) -> None:
        """What is compared of a leaf that is in has changed."""
        self.accessed[leaf.pool_index] = leaf.accessed
        self.labels[leaf.pool_index] = leaf.tail_label

    def every(self, stride: int, first: int, count: int) -> tuple[Sequence[int], bytearray]:
        """`accessed` and `labels` of so many leaves, each `stride` places after the one before, round the pool at most
        once.
        """
        end, size = first + stride * count, len(self.leaves)
        accessed, labels = self.accessed[first:end:stride], self.labels[first:end:stride]
        if len(labels) < count:
            again = first + stride * len(labels) - size
            accessed += self.accessed[again : end - size : stride]
            labels += self.labels[again : end - size : stride]
        return accessed, labels

    def _append(self, leaf: BlockRecord) -> None:
        self.leaves.append(leaf)
        self.accessed.append(leaf.accessed)
        self.labels.append(leaf.tail_label)

    def _pop_into(self, pool_index: int, leaf: BlockRecord) -> BlockRecord | None:
        """The last leaf takes the place of this one; returns it, or None if they are the same."""
        last = self.leaves.pop()
        accessed, label = self.accessed.pop(), self.labels.pop()
        if last is leaf:
            return None
        self.leaves[pool_index] = last
        self.accessed[pool_index] = accessed
        self.labels[pool_index] = label
        return last


class FallbackPool(LeafPool):
    """As `LeafPool`, for a subset of its leaves."""

    def has(self, leaf: BlockRecord) -> bool:
        return leaf.fallback_index >= 0

    def add(self, leaf: BlockRecord) -> None:
        leaf.fallback_index = len(self.leaves)
        self._append(leaf)

    def remove(self, leaf: BlockRecord) -> None:
        pool_index, leaf.fallback_index = leaf.fallback_index, -1
        last = self._pop_into(pool_index, leaf)
        if last is not None:
            last.fallback_index = pool_index

    def refresh(self, leaf: BlockRecord) -> None:
        self.accessed[leaf.fallback_index] = leaf.accessed
        self.labels[leaf.fallback_index] = leaf.tail_label
