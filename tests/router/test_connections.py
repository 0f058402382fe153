"""Connections of all kinds: large, slow, many, old, kept; keys and model lists."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import aiohttp

from tests.fakes.fake_http_engine import (
    DONE,
    Answer,
    chat_body,
    chat_chunk,
    json_answer,
    running_engine,
)
from tests.router.router_under_test import PATIENCE_S, RouterUnderTest, chat, config, options, running_router, static


async def test_large_bodies_pass_in_both_directions() -> None:
    text = "wide " * 600_000
    async with running_engine() as engine, running_router() as router:
        await router.sidecar(engine, capacity_tokens=10_000_000)
        engine.answer = lambda _: json_answer(chat_body(text))
        body = json.dumps(chat(text)).encode()
        status, answer, _ = await router.post("/v1/chat/completions", body)
        assert status == 200
        assert answer["choices"][0]["message"]["content"] == text
        assert engine.seen[0].body == body


async def test_a_client_that_asks_before_it_sends_its_body_is_told_to_go_on() -> None:
    async with running_engine() as engine, running_router() as router:
        await router.sidecar(engine)
        status, _, _ = await router.post("/v1/chat/completions", chat(), expect100=True)
        assert status == 200


async def test_a_client_that_does_not_read_is_given_up() -> None:
    """The engine sends more than the sockets hold; the client never takes it."""
    settings = config(options=options(times={"client_write_s": 0.3}))
    piece = b"data: " + b"x" * 500_000 + b"\n\n"
    async with running_engine() as engine, running_router(settings) as router:
        engine.answer = lambda _: Answer(pieces=[piece] * 100)
        await router.sidecar(engine)
        reader, writer = await asyncio.open_connection("127.0.0.1", router.router.http_port, limit=1024)
        body = json.dumps(chat(stream=True)).encode()
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        writer.write(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        await writer.drain()
        await router.until(lambda: bool(engine.seen))
        assert router.router.pool.dispatcher.dispatched == 1
        await router.nothing_is_left()
        assert await router.metric("requests_total", api="/v1/chat/completions", outcome="cancelled") == 1
        writer.transport.abort()
        assert reader is not None


async def test_models_come_from_a_live_engine_or_from_the_router_itself() -> None:
    async with running_engine() as engine, running_router() as router:
        status, text = await router.get("/v1/models")
        assert (status, [m["id"] for m in json.loads(text)["data"]]) == (200, ["m"])
        await router.sidecar(engine)
        status, text = await router.get("/v1/models")
        assert json.loads(text)["data"][0]["max_model_len"] == 4096


async def test_the_engines_key_replaces_the_clients(tmp_path: Path) -> None:
    from kvrouting_router.client_call import ApiKeys

    settings = config(api_keys=ApiKeys(["mine"]), engine_key="theirs", static_workers=())
    async with running_engine() as engine, running_router(settings) as router:
        router.session.headers["Authorization"] = "Bearer mine"
        await router.sidecar(engine)
        status, _, _ = await router.post("/v1/chat/completions", chat())
        assert status == 200
        assert engine.seen[0].headers["Authorization"] == "Bearer theirs"


async def test_a_static_worker_serves_without_a_sidecar() -> None:
    async with running_engine() as engine:
        engine.server_info = {"max_total_num_tokens": 4800}
        async with running_router(config(static_workers=[static(engine)])) as router:
            name = f"127.0.0.1:{engine.port}/0"
            await router.state(name, "live")
            status, _, _ = await router.post("/v1/chat/completions", chat())
            assert status == 200
            worker = await router.worker(name)
            assert (worker["mirror"], worker["sidecar"], worker["capacity_tokens"]) == ("approximate", False, 4800)
            assert await router.metric("approximate_worker", worker=name) == 1


async def test_many_streams_at_once_stay_apart() -> None:
    async with running_engine() as engine, running_router() as router:
        engine.answer = lambda seen: Answer(pieces=[chat_chunk(str(seen.json["seed"])), DONE])
        await router.sidecar(engine)

        async def one(router: RouterUnderTest, seed: int) -> bytes:
            _, raw, _ = await router.post("/v1/chat/completions", chat(stream=True, seed=seed))
            assert isinstance(raw, bytes)
            return raw

        raws = await asyncio.gather(*(one(router, i) for i in range(64)))
        assert raws == [chat_chunk(str(i)) + DONE for i in range(64)]
        await router.nothing_is_left()


async def test_an_http_1_0_client_gets_its_stream_until_the_connection_ends() -> None:
    async with running_engine() as engine, running_router() as router:
        await router.sidecar(engine)
        body = json.dumps(chat(stream=True)).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", router.router.http_port)
        head = b"POST /v1/chat/completions HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        writer.write(head % len(body) + body)
        async with asyncio.timeout(PATIENCE_S):
            raw = await reader.read()
        assert raw.endswith(DONE)
        writer.close()


async def test_a_connection_is_kept_and_used_again() -> None:
    async with running_engine() as engine, running_router() as router:
        await router.sidecar(engine)
        connector = aiohttp.TCPConnector(limit=1)
        async with aiohttp.ClientSession(connector=connector) as session:
            for _ in range(3):
                async with session.post(router.url + "/v1/chat/completions", json=chat()) as response:
                    assert response.status == 200
                    await response.read()
            server = router.router._http.server
            assert server is not None
            assert max(c._request_count for c in server.connections) == 3
