"""Clients that close their connection as soon as they have what they want."""

from __future__ import annotations

import asyncio
import json
import logging

import pytest

from tests.fakes.fake_http_engine import DONE, Answer, chat_chunk, running_engine, usage_chunk
from tests.router.router_under_test import PATIENCE_S, RouterUnderTest, chat, running_router


async def read_until_and_leave(router: RouterUnderTest, mark: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", router.router.http_port)
    body = json.dumps(chat(stream=True)).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    async with asyncio.timeout(PATIENCE_S):
        await reader.readuntil(mark)
    writer.transport.abort()


async def test_a_client_that_leaves_at_the_end_mark_has_its_whole_answer(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    never = asyncio.Event()  # the engine ends its body later than its last event
    usage = usage_chunk(prompt=10, completion=1, cached=4)
    async with running_engine() as engine, running_router() as router:
        await router.sidecar(engine)
        begun = asyncio.Event()
        begun.set()
        pieces = [chat_chunk("a"), usage, DONE, b": later\n\n"]
        engine.answer = lambda _: Answer(pieces=pieces, gates=[begun, begun, begun, never])
        try:
            await read_until_and_leave(router, b"data: [DONE]\n\n")
            await router.nothing_is_left()
        finally:
            never.set()
        assert await router.metric("requests_total", api="/v1/chat/completions", outcome="completed") == 1
        assert await router.metric("cached_tokens_total") == 4
    assert "request failed" not in caplog.messages


async def test_a_client_that_leaves_before_it_has_cancelled(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with running_engine() as engine, running_router() as router:
        await router.sidecar(engine)
        engine.answer = lambda _: Answer(pieces=[chat_chunk("a")], hang=True)
        await read_until_and_leave(router, b'"content": "a"')
        await router.nothing_is_left()
        assert await router.metric("requests_total", api="/v1/chat/completions", outcome="cancelled") == 1
    assert "request failed" not in caplog.messages


async def test_an_engine_that_dies_after_its_end_mark_has_answered() -> None:
    async with running_engine() as engine, running_router() as router:
        await router.sidecar(engine)
        engine.answer = lambda _: Answer(pieces=[chat_chunk("a"), DONE], die_after=2)
        status, body, _ = await router.post("/v1/chat/completions", chat(stream=True))
        assert (status, body) == (200, chat_chunk("a") + DONE)
        assert await router.metric("requests_total", api="/v1/chat/completions", outcome="completed") == 1
        await router.nothing_is_left()
