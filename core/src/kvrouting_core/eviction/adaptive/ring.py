"""The names evicted last, with what was known of them."""

from __future__ import annotations

from collections import OrderedDict


class Ring:
    """First in, first out. Length: whatever each `put` allows."""

    def __init__(self) -> None:
        self._labels: OrderedDict[int, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._labels)

    def __contains__(self, name: int) -> bool:
        return name in self._labels

    def put(self, name: int, label: int, *, memory: int) -> None:
        """Remembers a name, and then the `memory` latest ones alone."""
        labels = self._labels
        size = len(labels)
        labels[name] = label
        if len(labels) == size:
            labels.move_to_end(name)
        while len(labels) > memory:
            labels.popitem(last=False)

    def take(self, name: int) -> int | None:
        """Forgets a name; its label, or None if it was not there."""
        return self._labels.pop(name, None)

    def clear(self) -> None:
        """Forgets all."""
        self._labels.clear()
