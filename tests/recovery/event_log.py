"""The engine's own event log, recorded beside the sidecar, and what it says of one prompt at any moment."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq
import zmq.asyncio

PageKey = tuple[int | None, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedBatch:
    """One event batch. unix_s: when the engine made it."""

    sequence: int
    unix_s: float
    events: Sequence[dict[str, Any]]


class EventLog:
    """Subscribes to one engine's KV events and keeps every batch."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.batches: list[RecordedBatch] = []

    async def record(self) -> None:
        """Never returns by itself."""
        socket = zmq.asyncio.Context.instance().socket(zmq.SUB)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.connect(f"tcp://127.0.0.1:{self._port}")
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        try:
            while True:
                _, sequence, payload = await socket.recv_multipart()
                unix_s, events, _ = msgspec.msgpack.decode(payload)
                self.batches.append(
                    RecordedBatch(sequence=int.from_bytes(sequence, "big"), unix_s=unix_s, events=events)
                )
        finally:
            socket.close(linger=0)

    def forget_before_flush(self) -> bool:
        """Begins anew with the latest batch that emptied the cache. Returns: whether there was one."""
        for i in reversed(range(len(self.batches))):
            if any(event["type"] == "AllBlocksCleared" for event in self.batches[i].events):
                del self.batches[:i]
                return True
        return False

    def is_contiguous(self) -> bool:
        """Whether no batch is missing since its first one."""
        numbers = [batch.sequence for batch in self.batches]
        return bool(numbers) and numbers == list(range(numbers[0], numbers[-1] + 1))

    def cached_prefix(self, prompt: Sequence[int]) -> Iterator[tuple[float, int]]:
        """(moment, leading tokens of the prompt that are cached from then on), once per event that was recorded.

        By the plain definition: all pages that live, walked from the prompt's beginning.
        """
        live: dict[int, PageKey] = {}
        by_content: dict[PageKey, int] = {}
        for batch in self.batches:
            for event in batch.events:
                _apply(event, live, by_content)
                yield batch.unix_s, _walk(prompt, by_content, _page_size(by_content))


def _apply(event: dict[str, Any], live: dict[int, PageKey], by_content: dict[PageKey, int]) -> None:
    if event["type"] == "AllBlocksCleared":
        live.clear()
        by_content.clear()
    elif event["type"] == "BlockRemoved":
        for page in event["block_hashes"]:
            by_content.pop(live.pop(page), None)
    else:
        parent, size = event["parent_block_hash"], event["block_size"]
        for i, page in enumerate(event["block_hashes"]):
            key = (parent, tuple(event["token_ids"][i * size : (i + 1) * size]))
            live[page] = key
            by_content[key] = page
            parent = page


def _page_size(by_content: dict[PageKey, int]) -> int:
    return len(next(iter(by_content))[1]) if by_content else 1


def _walk(prompt: Sequence[int], by_content: dict[PageKey, int], page_size: int) -> int:
    parent: int | None = None
    for start in range(0, len(prompt) - page_size + 1, page_size):
        page = by_content.get((parent, tuple(prompt[start : start + page_size])))
        if page is None:
            return start
        parent = page
    return len(prompt) - len(prompt) % page_size
