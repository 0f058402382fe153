"""Leaves in arrays with swap-remove, beside each leaf what a victim rule compares, and the place of each leaf in it."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import overload

from kvrouting_core.eviction.adaptive.granules import GranuleRecord


class LeafPool(Sequence[GranuleRecord]):
    """A record lies in at most one pool of each class: it holds its own place there, -1 for none.

    leaves: in an order that the calls alone decide. accessed, labels: of each leaf `accessed` and `tail_label`, copied
    here because a choice reads those of many leaves, and the records lie scattered over the memory. Not to be changed
    from outside.
    """

    def __init__(self) -> None:
        self.leaves: list[GranuleRecord] = []
        self.accessed = array("q")
        self.labels = bytearray()

    def __len__(self) -> int:
        return len(self.leaves)

    def __iter__(self) -> Iterator[GranuleRecord]:
        return iter(self.leaves)

    @overload
    def __getitem__(self, place: int) -> GranuleRecord: ...

    @overload
    def __getitem__(self, place: slice) -> Sequence[GranuleRecord]: ...

    def __getitem__(self, place: int | slice) -> GranuleRecord | Sequence[GranuleRecord]:
        return self.leaves[place]

    def has(self, leaf: GranuleRecord) -> bool:
        """Whether a leaf is in."""
        return leaf.place >= 0

    def add(self, leaf: GranuleRecord) -> None:
        """Takes in a leaf that is not in."""
        leaf.place = len(self.leaves)
        self._append(leaf)

    def remove(self, leaf: GranuleRecord) -> None:
        """Lets go of a leaf that is in."""
        place, leaf.place = leaf.place, -1
        last = self._pop_into(place, leaf)
        if last is not None:
            last.place = place

    def refresh(self, leaf: GranuleRecord) -> None:
        """What is compared of a leaf that is in has changed."""
        self.accessed[leaf.place] = leaf.accessed
        self.labels[leaf.place] = leaf.tail_label

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

    def _append(self, leaf: GranuleRecord) -> None:
        self.leaves.append(leaf)
        self.accessed.append(leaf.accessed)
        self.labels.append(leaf.tail_label)

    def _pop_into(self, place: int, leaf: GranuleRecord) -> GranuleRecord | None:
        """The last leaf takes the place of this one; returns it, or None if they are the same."""
        last = self.leaves.pop()
        accessed, label = self.accessed.pop(), self.labels.pop()
        if last is leaf:
            return None
        self.leaves[place] = last
        self.accessed[place] = accessed
        self.labels[place] = label
        return last


class SparePool(LeafPool):
    """As `LeafPool`, for a subset of its leaves."""

    def has(self, leaf: GranuleRecord) -> bool:
        return leaf.spare_place >= 0

    def add(self, leaf: GranuleRecord) -> None:
        leaf.spare_place = len(self.leaves)
        self._append(leaf)

    def remove(self, leaf: GranuleRecord) -> None:
        place, leaf.spare_place = leaf.spare_place, -1
        last = self._pop_into(place, leaf)
        if last is not None:
            last.spare_place = place

    def refresh(self, leaf: GranuleRecord) -> None:
        self.accessed[leaf.spare_place] = leaf.accessed
        self.labels[leaf.spare_place] = leaf.tail_label
