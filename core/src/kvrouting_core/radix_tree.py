"""The bare radix tree: runs of packed tokens on edges, whole pages, children keyed by their first page.

A path is given as bytes (see `pack_tokens`), so that runs are compared and searched at memory speed instead
of token by token. Offsets and lengths in this module are bytes and multiples of `page_bytes`.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, TypeVar

TOKEN_BYTES = array("I").itemsize
"""Bytes of one packed token id."""


class TreeNode:
    """edge: the run of tokens that leads here from the parent, empty at a root; the trees extend this
    class.
    """

    __slots__ = ("children", "edge", "parent")

    def __init__(self, parent: Any, edge: bytearray) -> None:
        self.parent: Any = parent
        self.edge = edge
        self.children: dict[bytes, Any] = {}


N = TypeVar("N", bound=TreeNode)


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Token ids as unsigned 32-bit integers in machine order; an `array("I")` is packed fastest.

    Raises: ValueError if an id is outside 0..2^32 − 1; TypeError for bytes and text, which are no token
    ids.
    """
    if isinstance(tokens, array) and tokens.typecode == "I":
        return tokens.tobytes()
    if isinstance(tokens, (bytes, bytearray, str)):
        raise TypeError(f"token ids must be a sequence of integers, got {type(tokens).__name__}; tokenize first")
    try:
        return array("I", list(tokens)).tobytes()
    except OverflowError:
        bad = next(token for token in tokens if not 0 <= token < 2**32)
        raise ValueError(f"token ids must be in 0..2^32-1, got {bad}") from None


def unpack_tokens(packed: bytes | bytearray) -> array[int]:
    """The token ids of a packed run, as `array("I")`."""
    return array("I", bytes(packed))


def walk(node: N, path: bytes, start: int, page_bytes: int) -> tuple[list[N], int, int]:
    """Follows a path down from a node, as far as it is in the tree.

    path: whole pages; path[start:] is what lies below the node.
    Returns (nodes reached, root side first; end of the match in the path; matched part of the last node's
    edge, 0 if that edge matched in full).
    """
    reached: list[N] = []
    end = len(path)
    while start < end:
        child = node.children.get(path[start : start + page_bytes])
        if child is None:
            break
        edge = child.edge
        reached.append(child)
        if not path.startswith(edge, start):
            common = _common_pages(edge, path, start, page_bytes)
            return reached, start + common, common
        start += len(edge)
        node = child
    return reached, start, 0


def put_above(node: N, upper: N, cut: int, page_bytes: int) -> None:
    """Splits a node's edge at `cut`, within 1 page..len − 1 page: `upper` takes the first part, the node
    keeps the rest.
    """
    upper.parent = node.parent
    upper.edge = node.edge[:cut]
    upper.parent.children[bytes(upper.edge[:page_bytes])] = upper
    del node.edge[:cut]
    node.parent = upper
    upper.children[bytes(node.edge[:page_bytes])] = node


def _common_pages(edge: bytearray, path: bytes, start: int, page_bytes: int) -> int:
    """Bytes of the longest common prefix of edge and path[start:] in whole pages, known to be at least one
    page.

    Bisection over slices: each step compares half of what is left, at memory speed.
    """
    low, high = 1, min(len(edge), len(path) - start) // page_bytes
    while low < high:
        middle = (low + high + 1) // 2
        first, last = low * page_bytes, middle * page_bytes
        if path[start + first : start + last] == edge[first:last]:
            low = middle
        else:
            high = middle - 1
    return low * page_bytes
