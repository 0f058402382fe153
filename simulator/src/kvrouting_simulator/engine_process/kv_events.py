"""KV events as SGLang 0.5.23 publishes them: what the cache stores and removes, in wire form.

A batch is the msgpack array `[ts, [events], dp_rank]`. An event is a map with its class under `type`; optional
fields at None are left out, `parent_block_hash` and `lora_id` never are. Hashes are signed 64-bit numbers.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence

import msgspec

from kvrouting_core.blocks import ChainHasher, Namespace
from kvrouting_core.radix_changes import StoredPages

GPU = "GPU"
"""The medium of the cache on the card, SGLang's only one without a hierarchical cache."""

# SGLang's page hashes are a public function of the tokens, equal in every engine: so is this one.
_PAGE_HASH_KEY = b"kvrouting simulated engine pages"


class KVCacheEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """Base of all events; `tag` puts the class name under `type`."""


class BlockStored(KVCacheEvent):
    """Chained pages that became cached: `token_ids` are those of all of them, `block_size` each."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    lora_name: str | None = None


class BlockRemoved(KVCacheEvent):
    """Pages that are no longer cached."""

    block_hashes: list[int]
    medium: str | None = None


class AllBlocksCleared(KVCacheEvent):
    """No page is cached any more."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True, gc=False):
    """What one scheduler step changed. ts: seconds since 1970."""

    ts: float
    events: Sequence[Event]
    attn_dp_rank: int | None = None


class PageHasher:
    """Hashes of the cache's pages, chained over namespace and all tokens before."""

    def __init__(self, page_size: int) -> None:
        self._chain = ChainHasher(_PAGE_HASH_KEY, page_size)

    def root(self, namespace: Hashable, /) -> int:
        """The state before the first page. Raises: TypeError for what is no `Namespace`."""
        if not isinstance(namespace, Namespace):
            raise TypeError(f"pages are hashed under a Namespace, got {namespace!r}")
        return self._chain.root(namespace)

    def extend(self, state: int, position: int, tokens: Sequence[int], /) -> tuple[array[int], array[int]]:
        """Hashes of the pages in `tokens` and the states after them: see `ChainHasher.extend`."""
        return self._chain.extend(state, position, tokens)


def stored_event(pages: StoredPages) -> BlockStored:
    """The event that tells of these pages."""
    namespace = pages.namespace if isinstance(pages.namespace, Namespace) else None
    return BlockStored(
        block_hashes=_signed(pages.hashes),
        parent_block_hash=None if pages.parent_hash is None else _signed(array("Q", [pages.parent_hash]))[0],
        token_ids=pages.tokens.tolist(),
        block_size=pages.page_size,
        lora_id=None,
        medium=GPU,
        cache_salt=namespace.cache_salt if namespace else None,
        lora_name=namespace.lora_adapter if namespace else None,
    )


def _signed(hashes: array[int]) -> list[int]:
    return array("q", hashes.tobytes()).tolist()


class EventRecorder:
    """Collects the changes of one cache until the step's batch is taken; the cache's change sink.

    Consecutive pages of one chain become one event, consecutive removals too, as in SGLang's recorder.
    """

    def __init__(self) -> None:
        self._events: list[Event] = []
        self.removed_pages = 0
        """Pages removed since the start, those of a flush not counted."""

    def stored(self, pages: StoredPages, /) -> None:
        """These pages are cached from now on."""
        event = stored_event(pages)
        tail = self._events[-1] if self._events else None
        if isinstance(tail, BlockStored) and _continues(tail, event):
            tail.block_hashes.extend(event.block_hashes)
            tail.token_ids.extend(event.token_ids)
        else:
            self._events.append(event)

    def removed(self, hashes: array[int], /) -> None:
        """These pages are no longer cached."""
        self.removed_pages += len(hashes)
        tail = self._events[-1] if self._events else None
        if isinstance(tail, BlockRemoved):
            tail.block_hashes.extend(_signed(hashes))
        else:
            self._events.append(BlockRemoved(block_hashes=_signed(hashes), medium=GPU))

    def cleared(self) -> None:
        """No page is cached any more."""
        self._events.append(AllBlocksCleared())

    def take(self) -> list[Event]:
        """The events since the last call, in order; empty if nothing changed."""
        events, self._events = self._events, []
        return events


def _continues(tail: BlockStored, event: BlockStored) -> bool:
    return (
        event.parent_block_hash == tail.block_hashes[-1]
        and event.cache_salt == tail.cache_salt
        and event.lora_name == tail.lora_name
    )
