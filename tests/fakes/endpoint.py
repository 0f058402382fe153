"""A small endpoint that answers as it is told: streams, errors, cut connections, silence."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field

from aiohttp import web


@dataclass(kw_only=True)
class Script:
    """How the endpoint answers one request."""

    status: int = 200
    events: tuple[Mapping[str, object] | str, ...] = ()
    done: bool = True
    abort: bool = False  # the connection breaks after the events
    silent: bool = False  # nothing more comes after the events, and the connection stays
    headers: Mapping[str, str] = field(default_factory=dict)
    body: str = ""


Answer = Callable[[str, Mapping[str, object]], Script]


@dataclass(kw_only=True)
class FakeEndpoint:
    """answer: from path and body to a script. seen: paths and bodies in order of arrival."""

    answer: Answer
    seen: list[tuple[str, Mapping[str, object]]] = field(default_factory=list)
    request_ids: list[str | None] = field(default_factory=list)
    url: str = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Serves any POST."""
        text = await request.text()
        body = json.loads(text) if text else {}
        self.seen.append((request.path, body))
        self.request_ids.append(request.headers.get("x-request-id"))
        script = self.answer(request.path, body)
        if script.status != 200 or not script.events:
            return web.Response(status=script.status, text=script.body, headers=dict(script.headers))
        response = web.StreamResponse(headers={"content-type": "text/event-stream", **script.headers})
        await response.prepare(request)
        for event in script.events:
            data = event if isinstance(event, str) else json.dumps(event)
            await response.write(f"data: {data}\n\n".encode())
        if script.silent:
            await asyncio.sleep(60)
        if script.abort:
            assert request.transport is not None
            request.transport.abort()
            return response
        if script.done:
            await response.write(b"data: [DONE]\n\n")
        return response


@contextlib.asynccontextmanager
async def serving(answer: Answer) -> AsyncIterator[FakeEndpoint]:
    """Runs an endpoint on a free port of the loopback."""
    endpoint = FakeEndpoint(answer=answer)
    app = web.Application(client_max_size=1 << 24)
    app.router.add_post("/{path:.*}", endpoint.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    endpoint.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield endpoint
    finally:
        await runner.cleanup()


def generate_events(*, tokens: int, prompt_tokens: int, cached_tokens: int = 0) -> tuple[Mapping[str, object], ...]:
    """The stream of /generate: every event repeats all tokens so far."""
    return tuple(
        {
            "text": "x" * count,
            "output_ids": list(range(1, count + 1)),
            "meta_info": {
                "prompt_tokens": prompt_tokens,
                "completion_tokens": count,
                "cached_tokens": cached_tokens,
            },
        }
        for count in range(1, tokens + 1)
    )
