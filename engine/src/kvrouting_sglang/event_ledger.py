"""SGLang's recorder of KV events, extended by what makes them checkable: how many pages live, their digest, and the
number of the batch that comes next.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from sglang.srt.disaggregation.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    StorageMedium,
    namespaced_block_hash,
)
from sglang.srt.mem_cache.events import KVCacheEventRecorder
from sglang.srt.mem_cache.utils import hash_str_to_int64

_MASK = 2**64 - 1


class Position(NamedTuple):
    """sequence: number of the batch that comes next. pages, digest: count and sum mod 2^64 of the hashes of the pages
    that live after all batches before it.
    """

    sequence: int
    pages: int
    digest: int


class EventLedger(KVCacheEventRecorder):  # type: ignore[misc]
    """Counts what goes through. SGLang publishes each non-empty `take` as one batch, numbered from 0."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._pages = 0
        self._digest = 0
        self._published = Position(0, 0, 0)

    @property
    def published(self) -> Position:
        """Where the stream stands. One value, replaced as a whole: any thread may read it."""
        return self._published

    def enqueue(self, event: Any) -> None:
        """Counts the event, then queues it as SGLang does."""
        if isinstance(event, BlockStored):
            self._pages += len(event.block_hashes)
            self._digest += sum(event.block_hashes)
        elif isinstance(event, BlockRemoved):
            self._pages -= len(event.block_hashes)
            self._digest -= sum(event.block_hashes)
        elif isinstance(event, AllBlocksCleared):
            self._pages = self._digest = 0
        super().enqueue(event)

    def take(self) -> list[Any]:
        """The queued events, which SGLang publishes as one batch if there are any."""
        events: list[Any] = super().take()
        if events:
            self._published = Position(self._published.sequence + 1, self._pages, self._digest & _MASK)
        return events

    def hash_values(self, node: Any) -> list[str] | None:
        """What a node's published hashes derive from, one value per page; None if it was never hashed.

        Nodes without a namespace have their plain hashes, the others hashes that start from the namespace.
        """
        plain = node.key.extra_key is None and node.key.cache_salt is None
        values: list[str] | None = node.hash_value if plain else node.event_hash_value
        return values

    def published_hashes(self, node: Any, values: list[str]) -> list[int]:
        """The signed 64-bit hashes that SGLang publishes for these values of the node."""
        key = node.key
        plain = key.extra_key is None and key.cache_salt is None
        seed = None if plain else self._namespace_seed(node)
        if seed is None:
            return [hash_str_to_int64(value) for value in values]
        return [namespaced_block_hash(hash_str_to_int64(value), namespace_seed=seed) for value in values]

    def lora_name(self, node: Any) -> str | None:
        """The adapter that SGLang names in the node's events."""
        names = self.lora_names
        name: str | None = (names.resolve if self.dynamo_format else names.get)(node.key.extra_key)
        return name

    def record_tails(self, hashes: list[int]) -> None:
        """These pages were cut from the tails of leaves, children before parents."""
        if self.enabled and hashes:
            self.enqueue(BlockRemoved(block_hashes=hashes, medium=StorageMedium.GPU))
