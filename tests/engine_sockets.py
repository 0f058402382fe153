"""Plain ZeroMQ clients of an engine's sockets on this machine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import msgspec
import zmq
import zmq.asyncio


@contextlib.contextmanager
def connected(kind: int, port: int, *, topic: bytes = b"") -> Iterator[zmq.asyncio.Socket]:
    """A ZeroMQ client socket of this kind on a port of this machine."""
    context = zmq.asyncio.Context()
    socket = context.socket(kind)
    socket.linger = 0
    if kind == zmq.SUB:
        socket.subscribe(topic)
    socket.connect(f"tcp://127.0.0.1:{port}")
    try:
        yield socket
    finally:
        socket.close()
        context.term()


async def ask_state(port: int, op: str, *, seconds: float = 30) -> list[Any]:
    """All bodies that the state socket answers. Raises: TimeoutError if it falls silent."""
    bodies: list[Any] = []
    with connected(zmq.DEALER, port) as socket:
        await socket.send_multipart([b"", msgspec.msgpack.encode({"op": op})])
        while not (bodies and bodies[-1].get("end")):
            empty, body = await asyncio.wait_for(socket.recv_multipart(), seconds)
            assert empty == b""
            bodies.append(msgspec.msgpack.decode(body))
    return bodies
