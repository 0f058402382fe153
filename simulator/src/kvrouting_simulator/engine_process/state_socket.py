"""The state socket of one rank: epoch, digest and snapshot of the cache, as docs/state-socket.md describes them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import msgspec
import zmq
import zmq.asyncio

from kvrouting_core.radix_changes import StoredPages
from kvrouting_simulator.engine_process.kv_events import BlockStored, stored_event

VERSION = 1
# Between two chunks the engine steps: a chunk takes about 1 ms to make, and is a message of some 120 kB.
_CHUNK_PAGES = 8192

_log = logging.getLogger(__name__)


class StateSource(Protocol):
    """What the socket tells of its rank. Both answers stand for one instant."""

    def state(self) -> Mapping[str, Any]:
        """The body of the answer to `state`, without version and end."""

    def snapshot(self) -> tuple[str, int, Sequence[StoredPages]]:
        """Epoch, number of the next event batch, and the pages of each node of the tree."""


class StateSocket:
    """Answers one request after the other; a snapshot goes out in chunks between which the engine steps."""

    def __init__(self, router: zmq.Socket[bytes], source: StateSource) -> None:
        """router: a bound ROUTER socket, closed when `run` ends. silent: requests are read and never answered."""
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket = zmq.asyncio.Socket.from_socket(router)
        self._source = source
        self._encode = msgspec.msgpack.Encoder().encode
        self.silent = False

    async def run(self) -> None:
        """Serves until cancelled."""
        try:
            while True:
                client, *rest = await self._socket.recv_multipart()
                if not self.silent:
                    await self._answer(client, rest[-1] if rest else b"")
        finally:
            self._socket.close(linger=0)

    async def _answer(self, client: bytes, request: bytes) -> None:
        try:
            for body in self._bodies(request):
                await self._socket.send_multipart((client, b"", self._encode(body)))
                await asyncio.sleep(0)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            _log.info("a client of the state socket left before its answer was sent")

    def _bodies(self, request: bytes) -> Iterator[Mapping[str, Any]]:
        op = _op(request)
        if op == "state":
            yield {"version": VERSION, "end": True, **self._source.state()}
        elif op == "snapshot":
            epoch, position, nodes = self._source.snapshot()
            for chunk in _chunks(nodes):
                yield {"epoch": epoch, "position": position, "events": chunk}
            yield {"epoch": epoch, "position": position, "events": [], "end": True}
        else:
            yield {"error": f"unknown op {op!r}: 'state' and 'snapshot' are known", "end": True}


def _op(request: bytes) -> object:
    try:
        body = msgspec.msgpack.decode(request)
    except msgspec.DecodeError:
        return None
    return body.get("op") if isinstance(body, dict) else None


def _chunks(nodes: Sequence[StoredPages]) -> Iterator[Sequence[BlockStored]]:
    """Events of whole nodes; they are made when their chunk is due, not all at once."""
    chunk: list[BlockStored] = []
    pages = 0
    for node in nodes:
        if chunk and pages + len(node.hashes) > _CHUNK_PAGES:
            yield chunk
            chunk, pages = [], 0
        chunk.append(stored_event(node))
        pages += len(node.hashes)
    if chunk:
        yield chunk
