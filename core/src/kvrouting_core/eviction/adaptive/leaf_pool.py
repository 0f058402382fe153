"""An array of leaves with swap-remove, in which each leaf's place is known."""

from __future__ import annotations

from kvrouting_core.eviction.adaptive.granules import GranuleRecord


class LeafPool:
    """leaves: in an order that the calls alone decide; not to be changed from outside."""

    def __init__(self) -> None:
        self.leaves: list[GranuleRecord] = []
        self._places: dict[GranuleRecord, int] = {}

    def __len__(self) -> int:
        return len(self.leaves)

    def __contains__(self, leaf: GranuleRecord) -> bool:
        return leaf in self._places

    def add(self, leaf: GranuleRecord) -> None:
        """Without effect if it is in."""
        if leaf not in self._places:
            self._places[leaf] = len(self.leaves)
            self.leaves.append(leaf)

    def discard(self, leaf: GranuleRecord) -> None:
        """Without effect if it is not in."""
        place = self._places.pop(leaf, None)
        if place is None:
            return
        last = self.leaves.pop()
        if last is not leaf:
            self.leaves[place] = last
            self._places[last] = place
