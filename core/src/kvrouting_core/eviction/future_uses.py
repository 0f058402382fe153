"""When each cached page will be used next, looked up in a known sequence of requests."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Iterable, Sequence

from kvrouting_core.radix_tree import TOKEN_BYTES, TreeNode, pack_tokens, put_above, walk

NEVER = 2**62
"""The time of a use that does not come; later than any request."""


class SharedUse(TreeNode):
    """A run of pages that the same requests use. times: the positions of these requests in the sequence,
    ascending.
    """

    __slots__ = ("times",)

    def __init__(self, parent: SharedUse | None, edge: bytearray, times: list[int]) -> None:
        super().__init__(parent, edge)
        self.times = times

    def next_after(self, now: int) -> int:
        """Position of the first request after `now` that uses these pages, or NEVER."""
        later = bisect_right(self.times, now)
        return self.times[later] if later < len(self.times) else NEVER

    def used_at(self, now: int) -> bool:
        """Whether request `now` uses these pages."""
        place = bisect_left(self.times, now)
        return place < len(self.times) and self.times[place] == now


UNUSED = SharedUse(None, bytearray(), [])
"""Pages that no request of the sequence uses, such as answers that nobody continues."""


class FutureUses:
    """The radix tree of a whole sequence of requests, compressed: one node per run of pages with equal
    uses.
    """

    def __init__(self, requests: Iterable[tuple[Hashable, Sequence[int]]], *, page_size: int) -> None:
        """requests: (namespace, prompt tokens) in the order of admission. page_size: tokens, >= 1."""
        if page_size < 1:
            raise ValueError(f"page_size must be at least 1 token, got {page_size}")
        self._page_bytes = page_size * TOKEN_BYTES
        self._roots: dict[Hashable, SharedUse] = {}
        for position, (namespace, tokens) in enumerate(requests):
            packed = pack_tokens(tokens)
            self._add(namespace, packed[: len(packed) - len(packed) % self._page_bytes], position)

    def segments(self, namespace: Hashable, path: bytes) -> list[tuple[SharedUse, int]]:
        """Cuts a path into runs of equal use: [(uses, pages)], in path order, pages >= 1; UNUSED for the
        unknown rest.
        """
        root = self._roots.get(namespace)
        nodes, end, cut = walk(root, path, 0, self._page_bytes) if root is not None else ([], 0, 0)
        runs = [(node, len(node.edge) // self._page_bytes) for node in nodes]
        if cut:
            runs[-1] = (nodes[-1], cut // self._page_bytes)
        if end < len(path):
            runs.append((UNUSED, (len(path) - end) // self._page_bytes))
        return runs

    def _add(self, namespace: Hashable, path: bytes, position: int) -> None:
        root = self._roots.setdefault(namespace, SharedUse(None, bytearray(), []))
        nodes, end, cut = walk(root, path, 0, self._page_bytes)
        if cut:
            upper = SharedUse(None, bytearray(), list(nodes[-1].times))
            put_above(nodes[-1], upper, cut, self._page_bytes)
            nodes[-1] = upper
        for node in nodes:
            node.times.append(position)
        if end < len(path):
            parent = nodes[-1] if nodes else root
            rest = SharedUse(parent, bytearray(path[end:]), [position])
            parent.children[path[end : end + self._page_bytes]] = rest
