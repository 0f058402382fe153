"""What the tests compare: the live pages by the event stream, and those in SGLang's real tree."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sglang.srt.disaggregation.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from sglang.srt.mem_cache.events import KVCacheEventRecorder

_MASK = 2**64 - 1


class EventMirror:
    """The live pages by the events. Refuses a page stored twice or removed while absent, and an unknown parent."""

    def __init__(self) -> None:
        self.live: dict[int, tuple[int | None, tuple[int, ...]]] = {}

    def apply(self, events: Iterable[Any]) -> None:
        for event in events:
            if isinstance(event, BlockStored):
                self._store(event)
            elif isinstance(event, BlockRemoved):
                for page in event.block_hashes:
                    assert page in self.live, f"{page} was removed but is not live"
                    del self.live[page]
            else:
                assert isinstance(event, AllBlocksCleared), event
                self.live.clear()

    def _store(self, event: BlockStored) -> None:
        assert event.parent_block_hash is None or event.parent_block_hash in self.live
        for page, described in described_pages(event):
            assert page not in self.live, f"{page} was stored twice"
            self.live[page] = described


def described_pages(event: BlockStored) -> list[tuple[int, tuple[int | None, tuple[int, ...]]]]:
    """(hash, (hash of the page before, token ids)) of each page of a stored event."""
    size = event.block_size
    parents = [event.parent_block_hash, *event.block_hashes]
    assert len(event.token_ids) == size * len(event.block_hashes)
    return [
        (page, (parents[place], tuple(event.token_ids[place * size : (place + 1) * size])))
        for place, page in enumerate(event.block_hashes)
    ]


def node_events(cache: Any) -> list[BlockStored]:
    """SGLang's own recorder, run over every node of the real tree."""
    used = cache.tree_core.kv_events
    recorder = KVCacheEventRecorder(
        enabled=True, page_size=used.page_size, dynamo_format=used.dynamo_format, lora_names=used.lora_names
    )
    pending = list(cache.root_node.children.values())
    while pending:
        node = pending.pop()
        recorder.record_store(node)
        pending.extend(node.children.values())
    events: list[BlockStored] = recorder.take()
    return events


def real_pages(cache: Any) -> dict[int, tuple[int | None, tuple[int, ...]]]:
    """The live pages of the real tree, each with the page before it and its token ids."""
    return dict(page for event in node_events(cache) for page in described_pages(event))


def digest(pages: Iterable[int]) -> int:
    return sum(pages) & _MASK
