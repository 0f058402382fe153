"""Reads a live tree from another thread: the snapshot of docs/state-socket.md."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang.srt.disaggregation.kv_events import BlockStored, StorageMedium

from kvrouting_sglang.pauses import Pauses

if TYPE_CHECKING:
    from kvrouting_sglang.tree import PolicyTreeCore

_TOKENS_PER_EVENT = 512


@dataclass(frozen=True)
class _NodePages:
    """A node at one moment. values: one per page, see `EventLedger.hash_values`; above: that of the page before them,
    none at a root.

    values is the tree's own list: copying one of 100,000 pages would hold the interpreter for milliseconds. A split
    gives both nodes new lists and leaves this one alone; a node that is trimmed shortens it, and tells so in the
    stream.
    """

    node: Any
    values: list[str]
    above: list[str]
    token_ids: array[int]
    cache_salt: str | None


class TreeReader:
    """Never stops the thread that changes the tree; reads node by node and repeats what changed under its eyes."""

    def __init__(self, tree: PolicyTreeCore, *, pauses: Pauses) -> None:
        self._tree = tree
        self._pauses = pauses

    def snapshot(self) -> Iterator[list[Any]]:
        """`BlockStored` events of the live pages, in pieces; together with all batches from the position that was
        published when the first piece is asked for, they give the live set.

        A split moves pages into a new node without any event, so newer nodes are visited until there are none. Of
        these, nodes whose pages were inserted after the beginning are told of by the stream: they are left out, and so
        the end comes however fast the tree grows.
        """
        beginning = self._tree.live_nodes.newest
        seen = -1
        while (newest := self._tree.live_nodes.newest) != seen:
            for nodes in self._tree.live_nodes.walk(after=seen):
                for node in nodes:
                    if node.born <= beginning:
                        yield from self._events(node)
            seen = newest

    def _events(self, node: Any) -> Iterator[list[Any]]:
        pages = self._read(node)
        self._pauses.between_steps()
        if pages is None:
            return
        page_size = self._tree.page_size
        step = max(1, _TOKENS_PER_EVENT // page_size)
        ledger = self._tree.kv_events
        lora_name = ledger.lora_name(node)
        above = next(iter(ledger.published_hashes(node, pages.above)), None)
        for first in range(0, len(pages.values), step):
            hashes = ledger.published_hashes(node, pages.values[first : first + step])
            if not hashes:
                return  # trimmed meanwhile
            event = BlockStored(
                block_hashes=hashes,
                parent_block_hash=above,
                token_ids=pages.token_ids[first * page_size : (first + len(hashes)) * page_size].tolist(),
                block_size=page_size,
                lora_id=None,
                medium=StorageMedium.GPU,
                cache_salt=pages.cache_salt,
                lora_name=lora_name,
            )
            above = hashes[-1]
            yield [event]
            self._pauses.between_steps()

    def _read(self, node: Any) -> _NodePages | None:
        """The node's pages; None for a root and for a node that is gone."""
        tree = self._tree
        ledger = tree.kv_events
        while True:
            version = tree.version
            if version % 2 == 0:
                parent = node.parent
                if parent is None or not tree.holds(node):
                    return None
                key = node.key
                pages = _NodePages(
                    node=node,
                    values=ledger.hash_values(node) or [],
                    above=[] if parent.parent is None else (ledger.hash_values(parent) or [])[-1:],
                    token_ids=key.token_ids[: len(key)],
                    cache_salt=key.cache_salt,
                )
                if tree.version == version:
                    return pages
            self._pauses.rest()
