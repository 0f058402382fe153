"""Requests through the router to fake engines on real sockets: what goes in, what comes back, what is retried."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import pytest

from kvrouting_core.routing.events import Ended, Outcome
from tests.fakes.fake_http_engine import (
    DONE,
    Answer,
    FakeHttpEngine,
    Seen,
    chat_body,
    chat_chunk,
    generate_chunk,
    json_answer,
    running_engine,
    usage_chunk,
)
from tests.router.recording_policy import Recording
from tests.router.router_under_test import PATIENCE_S, chat, config, options, running_router

SURFACES = ["/v1/chat/completions", "/v1/completions", "/generate"]


def bodies_of(path: str) -> list[bytes]:
    """Each form that a surface knows, with odd spacing, order and unknown fields."""
    if path == "/v1/chat/completions":
        return [
            b'{ "messages":[{"role":"user","content":"h\\u00e9"}],\n"model":"m","x":{"a":[1,2]} , "top_p":0.50}',
            b'{"model":"m:ad","messages":[{"role":"user","content":[{"type":"text","text":"x"}]}],"n":3}',
            b'{"messages":[{"role":"user","content":"x"}],"max_tokens":null,"cache_salt":"s","extra_key":"k"}',
        ]
    if path == "/v1/completions":
        return [
            b'{"model":"m","prompt":"one","lora_path":"ad"}',
            b'{"prompt":["one","two"],"model":"m","n":2}',
            b'{"model":"m","prompt":[1,2,3]}',
            b'{"model":"m","prompt":[[1,2,3],[4,5]] }',
            b'{"model":"m","prompt":""}',
        ]
    return [
        b'{"text":"one","sampling_params":{"max_new_tokens":0}}',
        b'{"text":["one","two"],"sampling_params":[{"n":1},{"n":1}],"lora_path":["a","b"]}',
        b'{"input_ids":[1,2,3],"rid":"r1"}',
        b'{"input_ids":[[1,2],[3]]}',
        b'{"input_embeds":[[0.1,0.2]]}',
    ]


@pytest.mark.parametrize("path", SURFACES)
async def test_every_form_reaches_the_engine_byte_for_byte(path: str) -> None:
    async with running_engine() as engine, running_router() as router:
        await router.sidecar(engine)
        for body in bodies_of(path):
            status, _, headers = await router.post(path, body)
            assert status == 200
            assert engine.seen[-1].body == body
            assert json.loads(headers["x-kvrouting-decision"])["worker"] == "pod-a/0"
        await router.nothing_is_left()


async def test_query_and_headers_pass_and_hop_by_hop_headers_do_not() -> None:
    def answer(_seen: Seen) -> Answer:
        headers = {"X-Engine": "e", "Connection": "X-Private", "X-Private": "1", "Keep-Alive": "timeout=9"}
        return Answer(content_type="application/json", pieces=[chat_body()], headers=headers)

    async with running_engine() as engine, running_router() as router:
        engine.answer = answer
        await router.sidecar(engine)
        sent = {
            "X-Mine": "v",
            "Connection": "X-Hop",
            "X-Hop": "1",
            "TE": "trailers",
            "Accept-Encoding": "gzip",
            "X-Data-Parallel-Rank": "7",
            "Authorization": "Bearer client",
        }
        status, _, headers = await router.post("/v1/chat/completions?a=b", chat(), headers=sent)
        seen = {k.lower(): v for k, v in engine.seen[0].headers.items()}
        assert status == 200
        assert engine.seen[0].path == "/v1/chat/completions?a=b"
        assert seen["x-mine"] == "v"
        assert seen["authorization"] == "Bearer client"
        assert seen["accept-encoding"] == "identity"
        assert not {"x-hop", "te", "x-data-parallel-rank"} & seen.keys()
        assert headers["x-engine"] == "e"
        assert not {"x-private", "keep-alive"} & headers.keys()


@pytest.mark.parametrize("path", SURFACES)
async def test_the_rank_is_pinned_where_an_engine_has_several(path: str) -> None:
    async with running_engine() as engine, running_router() as router:
        await router.sidecar(engine, dp_rank=1, dp_size=2)
        body = bodies_of(path)[0]
        status, _, _ = await router.post(path, body)
        assert status == 200
        assert {k.lower(): v for k, v in engine.seen[0].headers.items()}["x-data-parallel-rank"] == "1"
        if path == "/generate":  # there the engine reads the rank from the body
            assert engine.seen[0].body == body[:-1] + b',"routed_dp_rank":1}'
        else:
            assert engine.seen[0].body == body


async def test_a_stream_comes_unchanged_and_each_event_at_once() -> None:
    gates = [asyncio.Event() for _ in range(3)]
    pieces = [chat_chunk("a"), chat_chunk("b", finish="stop"), DONE]
    async with running_engine() as engine, running_router() as router:
        engine.answer = lambda _: Answer(pieces=pieces, gates=gates)
        await router.sidecar(engine)
        gates[0].set()
        url = router.url + "/v1/chat/completions"
        async with router.session.post(url, json=chat(stream=True)) as response:
            assert response.headers["Content-Type"].startswith("text/event-stream")
            received = []
            for i, piece in enumerate(pieces):
                # The engine holds the next event back until this one has reached the client: buffering would hang.
                async with asyncio.timeout(PATIENCE_S):
                    received.append(await response.content.readexactly(len(piece)))
                if i + 1 < len(gates):
                    gates[i + 1].set()
            assert received == pieces
            assert await response.content.read() == b""
        await router.nothing_is_left()


async def test_an_event_that_arrives_in_parts_is_sent_whole_and_nothing_is_lost() -> None:
    stream = chat_chunk("a") + chat_chunk("b") + DONE + b": a comment without an end"
    parts = [stream[i : i + 7] for i in range(0, len(stream), 7)]
    async with running_engine() as engine, running_router() as router:
        engine.answer = lambda _: Answer(pieces=parts)
        await router.sidecar(engine)
        status, body, _ = await router.post("/v1/chat/completions", chat(stream=True))
        assert (status, body) == (200, stream)


async def test_client_sockets_do_not_wait_for_full_packets() -> None:
    async with running_engine() as engine, running_router() as router:
        engine.answer = lambda _: Answer(pieces=[chat_chunk("a")], hang=True)
        await router.sidecar(engine)
        async with router.session.post(router.url + "/v1/chat/completions", json=chat(stream=True)) as response:
            await response.content.readany()
            server = router.router._http.server
            assert server is not None
            busy = [c for c in server.connections if c._current_request is not None]
            transport = busy[0].transport
            assert transport is not None
            assert transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_takes_its_request_with_it(stream: bool) -> None:
    async with running_engine() as engine, running_router() as router:
        if stream:
            engine.answer = lambda _: Answer(pieces=[chat_chunk("a")], hang=True)
        else:
            engine.answer = lambda _: Answer(before_headers=asyncio.Event())
        await router.sidecar(engine)
        task = asyncio.create_task(router.post("/v1/chat/completions", chat(stream=stream)))
        async with asyncio.timeout(PATIENCE_S):
            await engine.arrived.wait()
        if stream:
            await asyncio.sleep(0.05)
        assert (await router.worker())["in_flight"] == 1
        task.cancel()
        async with asyncio.timeout(PATIENCE_S):
            await engine.disconnected.wait()
        await router.nothing_is_left()
        assert await router.metric("requests_total", api="/v1/chat/completions", outcome="cancelled") == 1
        assert (await router.worker())["state"] == "live"


def failing(kind: str) -> Answer:
    """Ways to fail before the first byte of an answer."""
    return {
        "dies before headers": Answer(die_after=-1),
        "dies after headers": Answer(die_after=0),
        "500": json_answer(b'{"object":"error","message":"broken"}', status=500),
        "503": json_answer(b"{}", status=503),
        "no headers in time": Answer(before_headers=asyncio.Event()),
        "no event in time": Answer(hang=True),
        "dies in a body": Answer(content_type="application/json", pieces=[b'{"a'], die_after=1),
    }[kind]


@pytest.mark.parametrize(
    ("kind", "stream"),
    [
        ("dies before headers", True),
        ("dies before headers", False),
        ("dies after headers", True),
        ("500", True),
        ("503", False),
        ("no headers in time", True),
        ("no event in time", True),
        ("dies in a body", False),
    ],
)
async def test_before_the_first_byte_another_worker_takes_over(kind: str, stream: bool) -> None:
    settings = config(options=options(times={"first_byte_s": 0.3}), policy="round_robin")
    async with running_engine() as bad, running_engine() as good, running_router(settings) as router:
        bad.answer = lambda _: failing(kind)
        await router.sidecar(bad, pod_uid="bad")
        await router.sidecar(good, pod_uid="good")
        for _ in range(2):  # by turns: at least one of both begins at the bad one
            status, _, headers = await router.post("/v1/chat/completions", chat(stream=stream))
            assert status == 200
            assert json.loads(headers["x-kvrouting-decision"])["worker"] == "good/0"
        tries = len(bad.seen)
        assert tries in (1, 2)
        assert len(good.seen) == 2
        assert await router.metric("retries_total") == tries
        assert await router.metric("requests_total", api="/v1/chat/completions", outcome="failed") == tries
        await router.nothing_is_left()


async def test_a_worker_that_cannot_be_reached_is_replaced() -> None:
    settings = config(policy="round_robin")
    async with running_engine() as gone, running_engine() as good, running_router(settings) as router:
        await router.sidecar(gone, pod_uid="gone")
        await router.sidecar(good, pod_uid="good")
        await gone.stop()
        for _ in range(2):
            status, _, _ = await router.post("/v1/completions", {"model": "m", "prompt": "x"})
            assert status == 200
        await router.nothing_is_left()


async def test_without_another_worker_the_engines_own_error_is_handed_on() -> None:
    async with running_engine() as engine, running_router() as router:
        own = b'{"object":"error","message":"out of memory","code":500}'
        engine.answer = lambda _: json_answer(own, status=500)
        await router.sidecar(engine)
        status, body, _ = await router.post("/v1/chat/completions", chat())
        assert (status, body) == (500, json.loads(own))
        engine.answer = lambda _: Answer(die_after=-1)
        status, body, _ = await router.post("/v1/chat/completions", chat())
        assert status == 502
        assert "pod-a/0" in body["error"]["message"]
        await router.nothing_is_left()


async def test_no_more_workers_are_tried_than_allowed() -> None:
    settings = config(options=options(routing={"max_attempts": 2}, breaker={"failures": 100}))
    async with running_router(settings) as router:
        engines = [FakeHttpEngine() for _ in range(3)]
        for i, engine in enumerate(engines):
            await engine.start()
            engine.answer = lambda _: Answer(die_after=-1)
            await router.sidecar(engine, pod_uid=f"e{i}")
        status, _, _ = await router.post("/v1/chat/completions", chat())
        assert status == 502
        assert sum(len(e.seen) for e in engines) == 2
        for engine in engines:
            await engine.stop()


BROKEN_STREAMS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", chat(stream=True)),
    ("/v1/completions", {"model": "m", "prompt": "x", "stream": True}),
    ("/generate", {"text": "x", "stream": True}),
]


@pytest.mark.parametrize(("path", "body"), BROKEN_STREAMS)
@pytest.mark.parametrize("how", ["dies", "dies within an event", "falls silent"])
async def test_after_the_first_byte_a_broken_stream_ends_with_an_error_event(
    path: str, body: dict[str, Any], how: str
) -> None:
    first = generate_chunk("a", completion=1, cached=0) if path == "/generate" else chat_chunk("a")
    answers = {
        "dies": Answer(pieces=[first], die_after=1),
        "dies within an event": Answer(pieces=[first, b'data: {"half":'], die_after=2),
        "falls silent": Answer(pieces=[first], hang=True),
    }
    settings = config(options=options(times={"idle_s": 0.2}))
    async with running_engine() as engine, running_engine() as other, running_router(settings) as router:
        for e in (engine, other):
            e.answer = lambda _: answers[how]
            await router.sidecar(e, pod_uid=f"p{e.port}")
        status, raw, _ = await router.post(path, body)
        assert status == 200
        assert raw.startswith(first)
        events = raw[len(first) :].split(b"\n\n")
        assert events[-1] == b""
        assert len(events) == 2
        error = json.loads(events[0].removeprefix(b"data: "))["error"]
        assert "worker" in error["message"]
        assert set(error) == ({"message"} if path == "/generate" else {"message", "type", "param", "code"})
        assert len(engine.seen) + len(other.seen) == 1  # the client has seen a part: nobody else may begin again
        await router.nothing_is_left()


async def test_an_engine_that_falls_silent_after_many_events_is_given_up() -> None:
    settings = config(options=options(times={"idle_s": 0.3}))
    async with running_engine() as engine, running_router(settings) as router:
        await router.sidecar(engine)
        gates = [asyncio.Event() for _ in range(4)]
        for number, gate in enumerate(gates):
            asyncio.get_running_loop().call_later(0.05 * number, gate.set)
        engine.answer = lambda _: Answer(pieces=[chat_chunk("a")] * 4, gates=gates, hang=True)
        status, raw, _ = await router.post("/v1/chat/completions", chat(stream=True))
        assert status == 200
        assert raw.startswith(chat_chunk("a"))
        assert b"sent no event within 0.3 s" in raw
        await router.nothing_is_left()


async def test_the_total_limit_ends_a_stream_with_an_error_event_and_a_wait_with_504() -> None:
    settings = config(options=options(times={"total_s": 0.4}))
    async with running_engine() as engine, running_router(settings) as router:
        await router.sidecar(engine)
        engine.answer = lambda _: Answer(pieces=[chat_chunk("a")], hang=True)
        status, raw, _ = await router.post("/v1/chat/completions", chat(stream=True))
        assert status == 200
        assert b"total time limit" in raw
        engine.answer = lambda _: Answer(before_headers=asyncio.Event())
        status, body, _ = await router.post("/v1/chat/completions", chat())
        assert status == 504
        assert "total time limit" in body["error"]["message"]
        await router.nothing_is_left()


async def test_an_engines_4xx_passes_and_never_counts_against_it() -> None:
    own = b'{"object":"error","message":"too long","type":"BadRequestError","code":400}'
    async with running_engine() as engine, running_router() as router:
        engine.answer = lambda _: json_answer(own, status=400)
        await router.sidecar(engine)
        for stream in (False, True) * 10:
            status, body, _ = await router.post("/v1/chat/completions", chat(stream=stream))
            assert (status, body) == (400, json.loads(own))
        assert len(engine.seen) == 20
        worker = await router.worker()
        assert (worker["state"], worker["breaker_open"]) == ("live", False)
        assert await router.metric("requests_total", api="/v1/chat/completions", outcome="rejected") == 20
        await router.nothing_is_left()


async def test_usage_is_read_from_every_kind_of_answer() -> None:
    async with running_engine() as engine, running_router() as router:
        await router.sidecar(engine)
        engine.answer = lambda _: json_answer(chat_body(cached=3))
        await router.post("/v1/chat/completions", chat("x" * 100))
        chunks = [chat_chunk("a"), usage_chunk(prompt=10, completion=1, cached=4), DONE]
        engine.answer = lambda _: Answer(pieces=chunks)
        await router.post("/v1/chat/completions", chat("x" * 100, stream=True))
        generated = [generate_chunk("a", completion=1, cached=5), generate_chunk("ab", completion=2, cached=5), DONE]
        engine.answer = lambda _: Answer(pieces=generated)
        await router.post("/generate", {"text": "x", "stream": True})
        assert await router.metric("cached_tokens_total") == 3 + 4 + 5
        assert (await router.worker())["reported_cached_tokens"] == 12


async def test_the_policy_hears_how_long_a_stream_without_usage_was() -> None:
    policy = Recording(at_once=4)
    async with running_engine() as engine, running_router(policy=lambda _: policy) as router:
        await router.sidecar(engine)
        engine.answer = lambda _: Answer(pieces=[chat_chunk(""), *map(chat_chunk, "abcd"), chat_chunk(""), DONE])
        await router.post("/v1/chat/completions", chat(stream=True))
        (ended,) = [e for e in policy.events if isinstance(e, Ended)]
        assert (ended.outcome, ended.output_tokens) == (Outcome.COMPLETED, 4)
