"""An engine that is nothing but its sockets, with a tree that tests change by hand.

It has events, replay, load, state and HTTP, on ports of its own.
Faults are methods: lose a batch, forget the replay buffer, fall silent, restart on the same ports.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from aiohttp import web

_MASK = (1 << 64) - 1
_END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
TOPIC = b"kv-events"

Page = tuple[int | None, tuple[int, ...], str | None, str | None]
"""Parent's hash, tokens, LoRA adapter, cache salt."""


class FakeRank:
    """One data-parallel rank: a tree of pages and the sockets that tell of it."""

    def __init__(self, engine: FakeEngine, number: int) -> None:
        self._engine = engine
        self.number = number
        self.page_size = engine.page_size
        self._lost_batches = 0
        self._swapped: tuple[int, bytes] | None = None
        self.swap_next = False
        self.state_silent = False
        self.snapshots_given = 0
        self.digest_error = 0
        self.between_chunks: list[Any] = []
        self.forget_everything()

    def forget_everything(self) -> None:
        """As a new process begins."""
        self.epoch = secrets.token_hex(8)
        self.sequence = 0
        self.pages: dict[int, Page] = {}
        self.replayable: deque[tuple[int, bytes]] = deque(maxlen=self._engine.replay_batches)

    # --- the tree ---

    def store(self, tokens: Sequence[int], *, lora: str | None = None, salt: str | None = None) -> None:
        """Cache a prompt; one batch, unless all of it was cached."""
        events: list[dict[str, Any]] = []
        parent: int | None = None
        for page, page_hash in self.path(tokens, lora=lora, salt=salt):
            if page_hash not in self.pages:
                self.pages[page_hash] = (parent, page, lora, salt)
                _append_stored(events, self._stored_event(page_hash))
            parent = page_hash
        if events:
            self.publish(events)

    def trim(self, tokens: Sequence[int], *, keep_pages: int) -> None:
        """Remove the tail of a prompt's path, unless other paths need it; one batch."""
        children = Counter(page[0] for page in self.pages.values())
        removed = []
        for _, page_hash in reversed(self.path(tokens)[keep_pages:]):
            if children[page_hash]:
                break
            if page_hash in self.pages:
                children[self.pages.pop(page_hash)[0]] -= 1
                removed.append(page_hash)
        if removed:
            self.publish([{"type": "BlockRemoved", "block_hashes": removed[::-1], "medium": "GPU"}])

    def clear(self) -> None:
        """Flush the cache; one batch."""
        self.pages.clear()
        self.publish([{"type": "AllBlocksCleared"}])

    def path(
        self, tokens: Sequence[int], *, lora: str | None = None, salt: str | None = None
    ) -> list[tuple[tuple[int, ...], int]]:
        """The full pages of a prompt with their signed hashes."""
        pages, state = [], repr((lora, salt)).encode()
        for start in range(0, len(tokens) - self.page_size + 1, self.page_size):
            page = tuple(tokens[start : start + self.page_size])
            state = hashlib.blake2b(state + repr(page).encode(), digest_size=8).digest()
            pages.append((page, int.from_bytes(state, "big", signed=True)))
        return pages

    @property
    def digest(self) -> int:
        return sum(self.pages) + self.digest_error & _MASK

    def _stored_event(self, page_hash: int) -> dict[str, Any]:
        parent, page, lora, salt = self.pages[page_hash]
        event = {
            "type": "BlockStored", "block_hashes": [page_hash], "parent_block_hash": parent, "token_ids": list(page),
            "block_size": self.page_size, "lora_id": None, "medium": "GPU",
        }  # fmt: skip
        return event | ({"lora_name": lora} if lora else {}) | ({"cache_salt": salt} if salt else {})

    # --- the wire ---

    def publish(self, events: Iterable[dict[str, Any]]) -> None:
        """Send a batch, or lose it."""
        payload = msgspec.msgpack.encode([time.time(), list(events), self.number])
        sequence, self.sequence = self.sequence, self.sequence + 1
        self.replayable.append((sequence, payload))
        if self._lost_batches:
            self._lost_batches -= 1
        elif self.swap_next:
            self.swap_next, self._swapped = False, (sequence, payload)
        else:
            self.send(sequence, payload)
            if self._swapped is not None:
                swapped, self._swapped = self._swapped, None
                self.send(*swapped)

    def send(self, sequence: int, payload: bytes) -> None:
        """Put a batch on the event socket, whatever its number."""
        self._events.send_multipart([TOPIC, sequence.to_bytes(8, "big"), payload])

    def lose(self, batches: int) -> None:
        """The next batches are not sent; the replay buffer has them."""
        self._lost_batches = batches

    def report_load(self, **fields: int) -> None:
        """Publish a load report."""
        order = (
            "running", "waiting", "tokens", "max_total_tokens", "dp_rank", "waiting_uncached_tokens", "total_tokens",
            "max_running", "total_prefill_uncached_tokens", "total_prefill_busy_us",
        )  # fmt: skip
        report = ["LoadStat", *(fields.get(name, 0) for name in order)]
        self._load.send_multipart([b"load", (0).to_bytes(8, "big"), msgspec.msgpack.encode(report)])

    def bind(self, context: zmq.asyncio.Context) -> list[asyncio.Task[None]]:
        """Open the sockets on the engine's ports."""
        ports, blocking = self._engine.ports, zmq.Context(context)
        self._events, self._load = blocking.socket(zmq.PUB), blocking.socket(zmq.PUB)
        self._replay, self._state = context.socket(zmq.ROUTER), context.socket(zmq.ROUTER)
        sockets = (self._events, self._replay, self._load, self._state)
        for socket, base in zip(sockets, ports, strict=True):
            socket.setsockopt(zmq.LINGER, 0)
            if socket is not self._state or self._engine.has_state_socket:
                socket.bind(f"tcp://127.0.0.1:{base + self.number}")
        return [asyncio.create_task(self._serve_replay()), asyncio.create_task(self._serve_state())]

    def close(self) -> None:
        for socket in (self._events, self._replay, self._load, self._state):
            socket.close(0)

    async def _serve_replay(self) -> None:
        while True:
            client, _, first = await self._replay.recv_multipart()
            for sequence, payload in list(self.replayable):
                if sequence >= int.from_bytes(first, "big"):
                    answer = [client, b"", TOPIC, sequence.to_bytes(8, "big"), payload]
                    await self._replay.send_multipart(answer)
            await self._replay.send_multipart([client, b"", TOPIC, _END_OF_REPLAY, b""])

    async def _serve_state(self) -> None:
        while True:
            client, _, body = await self._state.recv_multipart()
            if self.state_silent:
                continue
            if msgspec.msgpack.decode(body)["op"] == "state":
                await self._answer(client, self._state_body())
            else:
                await self._give_snapshot(client)

    def _state_body(self) -> dict[str, Any]:
        return {
            "version": 1, "end": True, "epoch": self.epoch, "dp_rank": self.number, "page_size": self.page_size,
            "sequence": self.sequence, "pages": len(self.pages), "digest": self.digest,
            "capacity_tokens": 100_000, "cached_tokens": len(self.pages) * self.page_size,
            "events_port": self._engine.ports[0] + self.number,
            "eviction": {"policy": "rlt", "live": self._engine.eviction_live, **self._engine.eviction_figures},
        }  # fmt: skip

    async def _give_snapshot(self, client: bytes) -> None:
        """Fuzzy: read node by node, children first, and the tree goes on changing meanwhile."""
        self.snapshots_given += 1
        epoch, position = self.epoch, self.sequence
        waiting = list(self.pages)[::-1]
        for start in range(0, len(waiting), 50):
            chunk = [self._stored_event(page) for page in waiting[start : start + 50] if page in self.pages]
            await self._answer(client, {"epoch": epoch, "position": position, "events": chunk})
            while self.between_chunks:
                self.between_chunks.pop(0)()
        await self._answer(client, {"epoch": epoch, "position": position, "events": [], "end": True})

    async def _answer(self, client: bytes, body: dict[str, Any]) -> None:
        await self._state.send_multipart([client, b"", msgspec.msgpack.encode(body)])


def _append_stored(events: list[dict[str, Any]], event: dict[str, Any]) -> None:
    """SGLang puts consecutive pages of one chain into one event."""
    if events and events[-1]["block_hashes"][-1] == event["parent_block_hash"]:
        events[-1]["block_hashes"] += event["block_hashes"]
        events[-1]["token_ids"] += event["token_ids"]
    else:
        events.append(event)


class FakeEngine:
    """An engine of `dp_size` ranks. An asynchronous context manager."""

    def __init__(
        self,
        *,
        page_size: int = 1,
        dp_size: int = 1,
        state_socket: bool = True,
        replay_batches: int = 10_000,
        events: bool = True,
    ) -> None:
        self.page_size = page_size
        self.has_state_socket = state_socket
        self.publishes_events = events
        self.replay_batches = replay_batches
        self.eviction_live = True
        self.eviction_figures: dict[str, Any] = {}
        self.healthy = True
        self.starts = 1
        self.http_requests: list[str] = []
        self._dp_size = dp_size
        self.ranks: list[FakeRank] = [FakeRank(self, number) for number in range(dp_size)]
        self.ports: tuple[int, int, int, int] = (0, 0, 0, 0)
        self._tasks: list[asyncio.Task[None]] = []
        self._http_port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http_port}"

    @property
    def state_endpoint(self) -> str:
        return f"tcp://127.0.0.1:{self.ports[3]}"

    async def __aenter__(self) -> FakeEngine:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Bind; the first time to free ports, later to the same."""
        self._context = zmq.asyncio.Context()
        if not self.ports[0]:
            self.ports = _free_port_ranges(4, self._dp_size)
        self._tasks = [task for rank in self.ranks for task in rank.bind(self._context)]
        app = web.Application()
        app.router.add_get("/server_info", self._server_info)
        app.router.add_get("/health", self._health)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._http_port)
        await site.start()
        self._http_port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """As a process dies: every socket closes."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for rank in self.ranks:
            rank.close()
        self._context.destroy(linger=0)
        await self._runner.cleanup()

    async def restart(self) -> None:
        """A new process at the same address: new epoch, empty cache, numbers from 0."""
        await self.stop()
        self.starts += 1
        for rank in self.ranks:
            rank.forget_everything()
        await self.start()

    async def _health(self, request: web.Request) -> web.Response:
        self.http_requests.append(request.path)
        return web.Response(status=200 if self.healthy else 503)

    async def _server_info(self, request: web.Request) -> web.Response:
        self.http_requests.append(request.path)
        events, replay, load, _ = self.ports
        body: dict[str, Any] = {
            "version": "0.5.23", "served_model_name": "fake-model", "page_size": self.page_size,
            "dp_size": self._dp_size, "max_total_num_tokens": 100_000, "radix_cache_backend": "rlt",
            "max_running_requests": 64, "chunked_prefill_size": 8192, "max_prefill_tokens": 16384,
            "prefill_decode_interval": 0, "enable_mixed_chunk": False, "startup_time": {"load_model": self.starts},
        }  # fmt: skip
        if self.publishes_events:
            body["kv_events"] = {
                "endpoint_port_base": events, "replay_endpoint_port_base": replay, "load_endpoint_port_base": load,
                "topic": TOPIC.decode(), "block_size": self.page_size, "dp_size": self._dp_size,
            }  # fmt: skip
        return web.json_response(body)


def _free_port_ranges(count: int, size: int) -> tuple[int, int, int, int]:
    """Bases of `count` disjoint ranges of free ports."""
    bases: list[int] = []
    while len(bases) < count:
        with zmq.Context() as context, context.socket(zmq.ROUTER) as probe:
            base = probe.bind_to_random_port("tcp://127.0.0.1", min_port=20_000, max_port=50_000)
            free = [base]
            for offset in range(1, size):
                try:
                    probe.bind(f"tcp://127.0.0.1:{base + offset}")
                except zmq.ZMQError:
                    break
                free.append(base + offset)
        if len(free) == size and all(abs(base - other) >= size for other in bases):
            bases.append(base)
    return bases[0], bases[1], bases[2], bases[3]
