"""The hinge between SGLang's tree and an eviction policy: the set of evictable leaves, which tells of its changes."""

from __future__ import annotations

from typing import Any

from kvrouting_core.eviction import EvictionPolicy


class PolicyLeaves(set[Any]):
    """The tree's set of evictable leaves; a policy hears of each leaf that comes and goes.

    SGLang calls `add` and `discard` for a node whenever its children or locks change, whether or not the node is in
    the set. It never iterates over the set: evictions are the policy's choice, in an order that hash seeds do not
    touch. A node's record is made when the node first becomes a leaf, which is when it is inserted.
    """

    def __init__(self, policy: EvictionPolicy[Any], page_size: int) -> None:
        super().__init__()
        self._policy = policy
        self._page_size = page_size

    def add(self, node: Any) -> None:
        """SGLang says that the node is an unlocked leaf."""
        if node in self:
            return
        super().add(node)
        if node.record is None:
            node.record = self._policy.record(node, len(node.key) // self._page_size)
        self._policy.evictable(node.record)

    def discard(self, node: Any) -> None:
        """SGLang says that the node is no unlocked leaf."""
        if node in self:
            super().discard(node)
            self._policy.pinned(node.record)

    def add_exposed(self, node: Any) -> None:
        """The node has become a leaf while the policy chooses; the policy knows."""
        super().add(node)

    def discard_chosen(self, node: Any) -> None:
        """The policy has chosen all of the node."""
        super().discard(node)
