"""An engine's HTTP surface that answers by script, and remembers byte for byte what it was sent."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from aiohttp import web


@dataclass(kw_only=True)
class Answer:
    """One scripted answer.

    pieces: sent one by one, unbuffered. gates: piece i is sent when gate i is set. die_after: the connection is cut
    after so many pieces; 0: before any, headers already sent; -1: before the headers. hang: nothing more comes, and the
    connection stays.
    """

    status: int = 200
    content_type: str = "text/event-stream"
    headers: dict[str, str] = field(default_factory=dict)
    pieces: Sequence[bytes] = ()
    gates: Sequence[asyncio.Event] = ()
    before_headers: asyncio.Event | None = None
    die_after: int | None = None
    hang: bool = False


@dataclass(kw_only=True)
class Seen:
    """A request as it arrived."""

    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> dict[str, object]:
        value: dict[str, object] = json.loads(self.body)
        return value


def chat_chunk(text: str, *, finish: str | None = None) -> bytes:
    """One event of an OpenAI chat stream."""
    choice = {"index": 0, "delta": {"role": "assistant", "content": text}, "finish_reason": finish}
    chunk = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def usage_chunk(*, prompt: int, completion: int, cached: int) -> bytes:
    """The last event of an OpenAI stream that was asked for usage."""
    usage = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    chunk = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [], "usage": usage}
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def generate_chunk(text: str, *, completion: int, cached: int, prompt: int = 10) -> bytes:
    """One event of a /generate stream."""
    meta = {"id": "g", "prompt_tokens": prompt, "completion_tokens": completion, "cached_tokens": cached}
    return b"data: " + json.dumps({"text": text, "meta_info": meta}).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


def chat_body(text: str = "hello", *, n: int = 1, cached: int | None = 0) -> bytes:
    """A whole OpenAI chat answer."""
    choices = [
        {"index": i, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"} for i in range(n)
    ]
    usage = {"prompt_tokens": 10, "completion_tokens": 2, "total_tokens": 12}
    if cached is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": cached}  # type: ignore[assignment]
    body = {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": choices, "usage": usage}
    return json.dumps(body).encode()


def completion_body(text: str = "hello") -> bytes:
    """A whole OpenAI completion."""
    choices = [{"index": 0, "text": text, "logprobs": None, "finish_reason": "stop"}]
    usage = {"prompt_tokens": 10, "completion_tokens": 2, "total_tokens": 12, "prompt_tokens_details": None}
    body = {"id": "c", "object": "text_completion", "created": 1, "model": "m", "choices": choices, "usage": usage}
    return json.dumps(body).encode()


def generate_body(text: str = "hello") -> bytes:
    """A whole /generate answer."""
    return json.dumps({"text": text, "meta_info": {"completion_tokens": 2, "cached_tokens": 0}}).encode()


def json_answer(body: bytes, *, status: int = 200) -> Answer:
    """An answer in one piece."""
    return Answer(status=status, content_type="application/json", pieces=[body])


def default_answer(seen: Seen) -> Answer:
    """What a healthy engine says."""
    body = seen.json
    if body.get("stream"):
        if seen.path == "/generate":
            return Answer(pieces=[generate_chunk(t, completion=i, cached=0) for i, t in enumerate("abc", 1)] + [DONE])
        return Answer(pieces=[chat_chunk("hel"), chat_chunk("lo", finish="stop"), DONE])
    if seen.path == "/v1/completions":
        return json_answer(completion_body())
    if seen.path == "/generate":
        return json_answer(generate_body())
    n = body.get("n")
    return json_answer(chat_body(n=n if isinstance(n, int) else 1))


class FakeHttpEngine:
    """answer: from a request to its script; replace it at will."""

    def __init__(self) -> None:
        self.answer: Callable[[Seen], Answer] = default_answer
        self.seen: list[Seen] = []
        self.healthy = True
        self.failed_probes = 0
        self.url = ""
        self.disconnects = 0
        self.disconnected = asyncio.Event()
        self.arrived = asyncio.Event()
        self.server_info: dict[str, object] = {}
        self._runner: web.AppRunner | None = None

    async def start(self, port: int = 0) -> None:
        """Listens on the loopback."""
        app = web.Application(client_max_size=1 << 28)
        app.router.add_get("/health", self._health)
        app.router.add_get("/server_info", self._info)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/{path:.*}", self._post)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", port).start()
        self.url = f"http://127.0.0.1:{self.port}"

    @property
    def port(self) -> int:
        assert self._runner is not None
        port: int = self._runner.addresses[0][1]
        return port

    async def stop(self) -> None:
        """Closes the port and all connections."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _health(self, _request: web.Request) -> web.Response:
        self.failed_probes += not self.healthy
        return web.Response(status=200 if self.healthy else 503)

    async def _info(self, _request: web.Request) -> web.Response:
        return web.json_response(self.server_info)

    async def _models(self, _request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "m", "object": "model", "max_model_len": 4096}]})

    async def _post(self, request: web.Request) -> web.StreamResponse:
        seen = Seen(path=request.path_qs, headers=dict(request.headers), body=await request.read())
        self.seen.append(seen)
        self.arrived.set()
        try:
            return await self._play(request, self.answer(seen))
        except asyncio.CancelledError:
            self.disconnects += 1
            self.disconnected.set()
            raise

    async def _play(self, request: web.Request, answer: Answer) -> web.StreamResponse:
        if answer.before_headers is not None:
            await answer.before_headers.wait()
        if answer.die_after == -1:
            return self._cut(request)
        response = web.StreamResponse(status=answer.status, headers=answer.headers)
        response.content_type = answer.content_type
        if answer.content_type == "application/json" and answer.die_after is None:
            response.content_length = sum(map(len, answer.pieces))
        await response.prepare(request)
        for i, piece in enumerate(answer.pieces):
            if answer.die_after == i:
                return self._cut(request)
            if i < len(answer.gates):
                await answer.gates[i].wait()
            await response.write(piece)
        if answer.die_after is not None:
            return self._cut(request)
        if answer.hang:
            await asyncio.Event().wait()
        await response.write_eof()
        return response

    def _cut(self, request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.abort()
        raise ConnectionResetError("cut by script")


@contextlib.asynccontextmanager
async def running_engine() -> AsyncIterator[FakeHttpEngine]:
    """An engine on a free port."""
    engine = FakeHttpEngine()
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()
