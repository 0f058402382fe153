"""Questions to the engine beside its event stream: replay of batches, state and snapshot of its tree.

Each question has a socket of its own, so a late answer to an earlier one can never be taken for its answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager

import msgspec
import zmq
import zmq.asyncio

from kvrouting_sidecar.dialling import dial
from kvrouting_sidecar.wire_events import EngineState, SnapshotChunk, UndecodableError, decode_chunk, decode_state

_END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)


class EngineSilentError(Exception):
    """The engine did not answer within the limit, or not with what was asked for."""


class EngineSockets:
    """The replay and state sockets of one rank. An endpoint that is None is one the engine lacks."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        *,
        replay_endpoint: str | None,
        state_endpoint: str | None,
        events_port: int | None = None,
        answer_limit_s: float = 2.0,
    ) -> None:
        """events_port: where the engine itself says that this rank publishes its events; None: it does not say.
        answer_limit_s: how long to wait for each message of an answer.
        """
        self._context = context
        self._replay_endpoint = replay_endpoint
        self._state_endpoint = state_endpoint
        self._events_port = events_port
        self._answer_limit_s = answer_limit_s

    async def replay(self, first: int) -> AsyncGenerator[tuple[int, bytes], None]:
        """The batches from `first` on that the engine still has, in order: at most its own buffer.

        Raises: EngineSilentError if there is no replay socket or it falls silent before the end.
        """
        with self._asking(self._replay_endpoint, "replay") as socket:
            await socket.send_multipart([b"", first.to_bytes(8, "big")])
            while True:
                frames = await self._answer(socket, "replay")
                sequence, payload = frames[-2], frames[-1]
                if sequence == _END_OF_REPLAY:
                    return
                yield int.from_bytes(sequence, "big"), payload

    async def state(self) -> EngineState:
        """Epoch, position, count and digest.

        Raises: EngineSilentError, also if the socket belongs to another engine: on a machine with two of them one
        forgotten option is enough, and the mirror would take the other one's cache for exact. UndecodableError.
        """
        with self._asking(self._state_endpoint, "state") as socket:
            state = await self._state(socket)
        if None not in (state.events_port, self._events_port) and state.events_port != self._events_port:
            raise EngineSilentError(
                f"the state socket at {self._state_endpoint} is that of another engine, whose events are on port"
                f" {state.events_port} and not {self._events_port}: give the right --state-endpoint"
            )
        return state

    async def snapshot(self) -> AsyncGenerator[SnapshotChunk, None]:
        """The tree in pieces, all of one position; the last has `end`. Raises: EngineSilentError; UndecodableError."""
        with self._asking(self._state_endpoint, "snapshot") as socket:
            await socket.send_multipart([b"", msgspec.msgpack.encode({"op": "snapshot"})])
            while True:
                chunk = decode_chunk((await self._answer(socket, "snapshot"))[-1])
                yield chunk
                if chunk.end:
                    return

    async def _state(self, socket: zmq.asyncio.Socket) -> EngineState:
        await socket.send_multipart([b"", msgspec.msgpack.encode({"op": "state"})])
        return decode_state((await self._answer(socket, "state"))[-1])

    async def _answer(self, socket: zmq.asyncio.Socket, what: str) -> list[bytes]:
        try:
            async with asyncio.timeout(self._answer_limit_s):
                frames: list[bytes] = await socket.recv_multipart()
        except TimeoutError as error:
            raise EngineSilentError(
                f"the engine's {what} socket did not answer within {self._answer_limit_s} s"
            ) from error
        if len(frames) < 2:
            raise UndecodableError(f"the engine's {what} socket answered with {len(frames)} frames")
        return frames

    @contextmanager
    def _asking(self, endpoint: str | None, what: str) -> Iterator[zmq.asyncio.Socket]:
        if endpoint is None:
            raise EngineSilentError(f"the engine has no {what} socket")
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        # The answer is bounded by the engine: 10,000 batches, or one tree. A limit here would lose parts of it.
        socket.setsockopt(zmq.RCVHWM, 0)
        try:
            dial(socket, endpoint)
            yield socket
        finally:
            socket.close()
