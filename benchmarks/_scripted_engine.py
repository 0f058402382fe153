"""A process that answers like several engines, written by hand so that it costs little beside what is measured.

`python -m benchmarks._scripted_engine PORTS` prints {"ports": [...]}. Every POST is answered with a stream; its
prompt, which every relay passes on, says how: `[EVENTS/PAUSE_MS]`. The first event comes at once, the others in one
burst after the pause, or each after a pause of its own with `[EVENTS*PAUSE_MS]`.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from typing import cast

import uvloop

_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_PAGE = json.dumps({"model_path": "m", "max_total_num_tokens": 1_000_000, "data": [{"id": "m"}]}).encode()
_CHUNK = {
    "id": "chatcmpl-5f0c3a9d2b7e4c61", "object": "chat.completion.chunk", "created": 1754000000, "model": "m",
    "choices": [{"index": 0, "delta": {"content": " word"}, "logprobs": None, "finish_reason": None}],
}  # fmt: skip
_EVENT = b"data: " + json.dumps(_CHUNK).encode() + b"\n\n"
_SCRIPT = re.compile(rb"\[(\d+)([/*])(\d+)\]")
_DONE = b"data: [DONE]\n\n"


def _chunked(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


_LAST = _chunked(_DONE) + b"0\r\n\r\n"


class EngineConnection(asyncio.Protocol):
    """One connection; requests on it come one after the other."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._pieces: list[bytes] = []
        self._size = 0
        self._awaited: int | None = None  # bytes of the request as a whole, once its headers are there
        self._head = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Remembers where to write."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Answers as soon as the request is complete."""
        self._pieces.append(data)
        self._size += len(data)
        if self._awaited is None:
            whole = b"".join(self._pieces)
            end = whole.find(b"\r\n\r\n")
            if end < 0:
                return
            self._head = whole[:end]
            self._awaited = end + 4 + int(_header(self._head, b"content-length") or 0)
        if self._size >= self._awaited:
            request = b"".join(self._pieces)
            self._pieces, self._size, self._awaited = [], 0, None
            self._answer(request)

    def _answer(self, request: bytes) -> None:
        if self._head.startswith(b"GET"):
            head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(_PAGE)
            self._transport.write(head + _PAGE)
            return
        script = _SCRIPT.search(request)
        if script is None:
            raise ValueError(f"a request has no script: {request[:300]!r}")
        self._transport.write(_HEAD + _chunked(_EVENT))
        left, pause_s = int(script[1]) - 1, int(script[3]) / 1000
        if script[2] == b"*":
            self._loop.call_later(pause_s, self._next, left, pause_s, self._loop.time() + pause_s)
        else:
            self._loop.call_later(pause_s, self._write, _chunked(_EVENT) * left + _LAST)

    def _next(self, left: int, pause_s: float, due_s: float) -> None:
        if left == 0:
            self._write(_LAST)
            return
        self._write(_chunked(_EVENT))
        due_s += pause_s
        self._loop.call_at(due_s, self._next, left - 1, pause_s, due_s)

    def _write(self, data: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(data)


def _header(head: bytes, name: bytes) -> bytes | None:
    lower = head.lower()
    start = lower.find(b"\r\n" + name + b":")
    if start < 0:
        return None
    start += len(name) + 3
    end = lower.find(b"\r\n", start)
    return head[start : end if end >= 0 else None].strip()


async def _serve(ports: int) -> None:
    loop = asyncio.get_running_loop()
    servers = [await loop.create_server(EngineConnection, "127.0.0.1", 0) for _ in range(ports)]
    print(json.dumps({"ports": [server.sockets[0].getsockname()[1] for server in servers]}), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(_serve(int(sys.argv[1])))
