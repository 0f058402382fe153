"""The official client, unchanged, through the router."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import openai
import pytest
import pytest_asyncio

from tests.fakes.fake_http_engine import (
    DONE,
    Answer,
    FakeHttpEngine,
    chat_chunk,
    json_answer,
    running_engine,
    usage_chunk,
)
from tests.router.router_under_test import PATIENCE_S, RouterUnderTest, running_router

Setup = tuple[RouterUnderTest, FakeHttpEngine, openai.AsyncOpenAI]


@pytest_asyncio.fixture
async def setup() -> AsyncIterator[Setup]:
    """A router, its engine and a client that does not retry by itself."""
    async with running_engine() as engine, running_router() as router:
        await router.sidecar(engine)
        async with openai.AsyncOpenAI(base_url=router.url + "/v1", api_key="none", max_retries=0) as client:
            yield router, engine, client
        await router.nothing_is_left()


async def test_chat(setup: Setup) -> None:
    _, _, client = setup
    answer = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
    assert answer.choices[0].message.content == "hello"
    assert answer.usage is not None
    assert answer.usage.total_tokens == 12


async def test_several_answers(setup: Setup) -> None:
    _, engine, client = setup
    answer = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}], n=3)
    assert len(answer.choices) == 3
    assert json.loads(engine.seen[-1].body)["n"] == 3


async def test_streaming_with_usage(setup: Setup) -> None:
    _, engine, client = setup
    engine.answer = lambda _: Answer(
        pieces=[chat_chunk("hel"), chat_chunk("lo"), usage_chunk(prompt=9, completion=2, cached=1), DONE]
    )
    stream = await client.chat.completions.create(
        model="m",
        messages=[{"role": "user", "content": "hi"}],
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "hello"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 2


async def test_completions(setup: Setup) -> None:
    _, _, client = setup
    answer = await client.completions.create(model="m", prompt=["one", "two"], max_tokens=3)
    assert answer.choices[0].text == "hello"


async def test_models(setup: Setup) -> None:
    _, _, client = setup
    assert [m.id async for m in client.models.list()] == ["m"]


async def test_a_cancelled_stream(setup: Setup) -> None:
    router, engine, client = setup
    engine.answer = lambda _: Answer(pieces=[chat_chunk("a")], hang=True)
    stream = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}], stream=True)
    async for _ in stream:
        break
    await stream.close()
    async with asyncio.timeout(PATIENCE_S):
        await engine.disconnected.wait()
    await router.nothing_is_left()


async def test_errors_are_the_clients_own_classes(setup: Setup) -> None:
    router, engine, client = setup
    create = client.chat.completions.create
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        await create(model="other", messages=[{"role": "user", "content": "hi"}])
    with pytest.raises(openai.BadRequestError, match="max_tokens must be at least 1"):
        await create(model="m", messages=[{"role": "user", "content": "hi"}], max_tokens=0)
    engine.answer = lambda _: json_answer(b'{"error":{"message":"too long","code":400}}', status=400)
    with pytest.raises(openai.BadRequestError, match="too long"):
        await create(model="m", messages=[{"role": "user", "content": "hi"}])
    engine.answer = lambda _: Answer(pieces=[chat_chunk("a")], die_after=1)
    with pytest.raises(openai.APIError, match="worker pod-a/0"):
        async for _ in await create(model="m", messages=[{"role": "user", "content": "hi"}], stream=True):
            pass
    await router.sidecars[0].heartbeat(engine_healthy=False)
    await router.state("pod-a/0", "suspect")
    with pytest.raises(openai.InternalServerError, match="no worker is ready"):
        await create(model="m", messages=[{"role": "user", "content": "hi"}])
