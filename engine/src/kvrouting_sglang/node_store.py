"""The live nodes of a tree, kept so that another thread can walk over them in short steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_NODES_PER_BOX = 256


class NodeStore:
    """Nodes by id, in boxes of consecutive ids.

    One thread puts and takes; another may walk at any time. Copying one box is a single step for the interpreter, so
    the walk never sees it half changed and never holds the other thread for long. Ids only rise: a walk has seen
    everything when it has reached the newest id, unless newer nodes have come.
    """

    def __init__(self) -> None:
        self._boxes: dict[int, dict[int, Any]] = {}
        self._newest = -1

    @property
    def newest(self) -> int:
        """Highest id ever put."""
        return self._newest

    def put(self, node: Any) -> None:
        """Takes in a node with an id above all others."""
        self._newest = node.id
        box = self._boxes.get(node.id // _NODES_PER_BOX)
        if box is None:
            box = self._boxes[node.id // _NODES_PER_BOX] = {}
        box[node.id] = node

    def take(self, node: Any) -> None:
        """Lets go of a node, if it is there."""
        number = node.id // _NODES_PER_BOX
        box = self._boxes.get(number)
        if box is None:
            return
        box.pop(node.id, None)
        if not box and number != self._newest // _NODES_PER_BOX:
            del self._boxes[number]

    def clear(self) -> None:
        """Lets go of all nodes."""
        self._boxes = {}

    def walk(self, *, after: int = -1) -> Iterator[list[Any]]:
        """The nodes with ids above `after`, in lists of at most 256; a node that comes or goes meanwhile may be left
        out.
        """
        boxes = self._boxes
        for number in [number for number in list(boxes) if number >= after // _NODES_PER_BOX]:
            box = boxes.get(number)
            if box is not None:
                yield [node for node in list(box.values()) if node.id > after]
