"""Requests through the router to fake engines on real sockets."""

from __future__ import annotations

import json

import pytest

from tests.fakes.fake_http_engine import running_engine
from tests.router.router_under_test import chat, running_router


async def test_a_chat_request_reaches_the_engine_byte_for_byte() -> None:
    async with running_engine() as engine, running_router() as router:
        await router.sidecar(engine)
        body = b'{ "messages":[{"role":"user","content":"h\\u00e9"}],\n "model":"m","unknown":{"a":[1,2]} , "top_p":0.50}'
        status, answer, headers = await router.post("/v1/chat/completions", body)
        assert status == 200
        assert answer["choices"][0]["message"]["content"] == "hello"
        assert engine.seen[0].body == body
        decision = json.loads(headers["x-kvrouting-decision"])
        assert decision["worker"] == "pod-a/0"
        await router.nothing_is_left()
