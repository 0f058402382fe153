"""Bad input of every kind: a clear error, nothing left behind, nobody else affected."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import pytest_asyncio

from kvrouting_router.client_call import ApiKeys
from kvrouting_router.options import SizeLimits
from tests.fakes.fake_http_engine import FakeHttpEngine, running_engine
from tests.router.router_under_test import PATIENCE_S, RouterUnderTest, chat, config, options, running_router

Pair = tuple[RouterUnderTest, FakeHttpEngine]


@pytest_asyncio.fixture
async def pair() -> AsyncIterator[Pair]:
    """A router with one live worker; afterwards nothing may be left, and a good request must still pass."""
    async with pair_with(client_read_s=PATIENCE_S) as made:
        yield made


@pytest_asyncio.fixture
async def impatient_pair() -> AsyncIterator[Pair]:
    """One that waits for a client's bytes no longer than 0.3 s."""
    async with pair_with(client_read_s=0.3) as made:
        yield made


@asynccontextmanager
async def pair_with(**times: float) -> AsyncIterator[Pair]:
    settings = config(options=options(times=times, sizes=SizeLimits(max_body_bytes=1 << 20, max_header_bytes=8192)))
    async with running_engine() as engine, running_router(settings) as router:
        await router.sidecar(engine)
        yield router, engine
        before = len(engine.seen)
        status, _, _ = await router.post("/v1/chat/completions", chat())
        assert status == 200
        assert len(engine.seen) == before + 1
        worker = await router.worker()
        assert (worker["state"], worker["breaker_open"]) == ("live", False)
        await router.nothing_is_left()


async def rejected(pair: Pair, path: str, body: Any, *, status: int, says: str, **options: Any) -> None:
    """The router itself answers with the API's error object, and no engine hears of it."""
    router, engine = pair
    got, answer, headers = await router.post(path, body, **options)
    assert got == status, answer
    error = answer["error"]
    assert says in error["message"]
    if path == "/generate":
        assert set(error) == {"message"}
    else:
        assert set(error) == {"message", "type", "param", "code"}
    assert headers["content-type"].startswith("application/json")
    assert engine.seen == []


HALF_A_REQUEST = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{"
)
CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, GENERATE])
@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "no JSON"),
        (b"{", "no JSON"),
        (b"null", "must be a JSON object, got null"),
        (b"[1]", "must be a JSON object, got a list"),
        (b'{"model":"m","prompt":"\xff\xfe","text":"\xff"}', "UTF-8"),
        (b'{"a":NaN}', "no JSON"),
        (b"[" * 100_000, "JSON"),
        (b'{"a":' * 100_000, "JSON"),
    ],
)
async def test_what_is_no_json_object(pair: Pair, path: str, body: bytes, says: str) -> None:
    await rejected(pair, path, body, status=400, says=says)


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        (CHAT, {"model": "m"}, "messages must be a non-empty list, got null"),
        (CHAT, {"model": "m", "messages": []}, "got an empty list"),
        (CHAT, {"model": "m", "messages": ["x"]}, "messages[0] must be an object"),
        (CHAT, {"model": "m", "messages": [{"content": "x"}]}, "with a role"),
        (CHAT, chat(max_tokens=0), "max_tokens must be at least 1, got 0"),
        (CHAT, chat(max_tokens=-5), "max_tokens must be at least 1, got -5"),
        (CHAT, chat(max_completion_tokens=0), "max_completion_tokens must be at least 1"),
        (CHAT, chat(max_tokens="9"), "max_tokens must be an integer, got a string"),
        (CHAT, chat(max_tokens=True), "max_tokens must be an integer, got a boolean"),
        (CHAT, chat(n=0), "n must be at least 1, got 0"),
        (CHAT, chat(n=-1), "n must be at least 1, got -1"),
        (CHAT, chat(n=1.5), "n must be an integer, got the number 1.5"),
        (CHAT, chat(stream="yes"), "stream must be true or false"),
        (CHAT, chat(cache_salt=3), "cache_salt must be a string"),
        (CHAT, chat() | {"model": 3}, "model must be a string"),
        (COMPLETIONS, {"model": "m"}, "prompt is missing"),
        (COMPLETIONS, {"model": "m", "prompt": None}, "prompt must be a string or a non-empty list"),
        (COMPLETIONS, {"model": "m", "prompt": []}, "got an empty list"),
        (COMPLETIONS, {"model": "m", "prompt": [1, -1]}, "prompt holds -1"),
        (COMPLETIONS, {"model": "m", "prompt": [1, "x"]}, "prompt holds 'x'"),
        (COMPLETIONS, {"model": "m", "prompt": [1, 2**32]}, "prompt holds 4294967296"),
        (COMPLETIONS, {"model": "m", "prompt": [1, True]}, "prompt holds True"),
        (COMPLETIONS, {"model": "m", "prompt": ["x", {}]}, "prompt[1] must be a string or a list of token ids"),
        (COMPLETIONS, {"model": "m", "prompt": "x", "max_tokens": 0}, "max_tokens must be at least 1"),
        (GENERATE, {}, "exactly one of text, input_ids and input_embeds"),
        (GENERATE, {"text": "a", "input_ids": [1]}, "exactly one of"),
        (GENERATE, {"text": 3}, "text must be a string"),
        (GENERATE, {"text": "a", "sampling_params": {"max_new_tokens": -1}}, "max_new_tokens must be at least 0"),
        (GENERATE, {"text": "a", "sampling_params": 3}, "sampling_params must be an object"),
        (GENERATE, {"text": "a", "sampling_params": {"n": 0}}, "n must be at least 1"),
        (CHAT, chat(n=1_000_000), "n must ask for at most 4096 answers in one request, got 1000000"),
        (COMPLETIONS, {"model": "m", "prompt": "x", "n": 4097}, "at most 4096 answers in one request, got 4097"),
        (COMPLETIONS, {"model": "m", "prompt": ["x"] * 4097}, "got 1 for each of 4097 prompts"),
        (COMPLETIONS, {"model": "m", "prompt": ["x", "y"], "n": 2049}, "got 2049 for each of 2 prompts"),
        (GENERATE, {"text": "a", "sampling_params": {"n": 10**30}}, f"got {10**30}"),
    ],
)
async def test_what_the_api_forbids(pair: Pair, path: str, body: Any, says: str) -> None:
    await rejected(pair, path, body, status=400, says=says)


async def test_unknown_models(pair: Pair) -> None:
    await rejected(pair, CHAT, chat() | {"model": "gpt"}, status=404, says="'gpt' does not exist; this pool serves 'm'")
    await rejected(pair, CHAT, chat() | {"model": "m:"}, status=404, says="'m:'")
    router, _ = pair
    _, answer, _ = await router.post(CHAT, chat() | {"model": "gpt"})
    assert answer["error"]["code"] == "model_not_found"


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
async def test_wrong_content_types(pair: Pair, kind: str) -> None:
    await rejected(pair, CHAT, chat(), status=415, says=kind, headers={"Content-Type": kind})


async def test_an_encoded_body(pair: Pair) -> None:
    await rejected(pair, CHAT, b"\x1f\x8b", status=415, says="gzip", headers={"Content-Encoding": "gzip"})


async def test_unknown_paths_and_methods(pair: Pair) -> None:
    await rejected(pair, "/v1/embeddings", {}, status=404, says="/v1/embeddings")
    await rejected(pair, "/workers", {}, status=405, says="GET")
    router, _ = pair
    status, text = await router.get(CHAT)
    assert (status, "POST" in json.loads(text)["error"]["message"]) == (405, True)


@pytest.mark.parametrize("declared", [True, False])
async def test_a_body_of_50_mb(pair: Pair, declared: bool) -> None:
    router, engine = pair
    data = b"x" * 50_000_000

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(data), 1 << 20):
            yield data[start : start + (1 << 20)]

    body = io.BytesIO(data) if declared else pieces()
    headers = {"Content-Type": "application/json"}
    async with router.session.post(router.url + CHAT, data=body, headers=headers) as response:
        assert response.status == 413
        assert "limit" in (await response.json())["error"]["message"]
    assert engine.seen == []


async def raw(router: RouterUnderTest, data: bytes) -> bytes:
    """Sends bytes as they are. Returns: everything until the router closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", router.router.http_port)
    writer.write(data)
    await writer.drain()
    async with asyncio.timeout(PATIENCE_S):
        answer = await reader.read()
    writer.close()
    return answer


@pytest.mark.parametrize(
    "head",
    [
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nX-Long: " + b"y" * 20_000 + b"\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n" + b"y" * 20_000 + b": v\r\n\r\n",
        b"GET /" + b"y" * 20_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\n" + b"".join(b"h%d: v\r\n" % i for i in range(1000)) + b"\r\n",
    ],
)
async def test_headers_too_large(pair: Pair, head: bytes) -> None:
    answer = await raw(pair[0], head)
    assert answer.split()[1] == b"431"
    error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
    assert "too large" in error["message"]


async def test_what_is_no_http(pair: Pair) -> None:
    answer = await raw(pair[0], b"\x16\x03\x01 hello\r\n\r\n")
    assert answer.split()[1] == b"400"
    assert b'"error"' in answer


async def test_a_broken_chunked_body(pair: Pair) -> None:
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    answer = await raw_until_answer(pair[0], head + b"Transfer-Encoding: chunked\r\n\r\nzz\r\nboo\r\n")
    assert answer.split()[1] == b"400"


@pytest.mark.parametrize("sent", [b"POST /v1/chat/compl", b"POST / HTTP/1.1\r\nHost: x\r\nA: b\r\n"])
async def test_headers_that_come_too_slowly(impatient_pair: Pair, sent: bytes) -> None:
    answer = await raw(impatient_pair[0], sent)
    assert answer.split()[1] == b"408"
    assert b"headers did not arrive within 0.3 s" in answer


async def test_a_body_that_comes_too_slowly(impatient_pair: Pair) -> None:
    answer = await raw_until_answer(impatient_pair[0], HALF_A_REQUEST)
    assert answer.split()[1] == b"408"
    assert b"body did not arrive within 0.3 s" in answer


async def raw_until_answer(router: RouterUnderTest, data: bytes) -> bytes:
    """Sends bytes and reads the first piece of the answer, then leaves."""
    reader, writer = await asyncio.open_connection("127.0.0.1", router.router.http_port)
    writer.write(data)
    async with asyncio.timeout(PATIENCE_S):
        answer = await reader.read(4096)
    writer.transport.abort()
    return answer


async def test_a_client_that_breaks_off_its_own_request(pair: Pair) -> None:
    router, engine = pair
    _, writer = await asyncio.open_connection("127.0.0.1", router.router.http_port)
    writer.write(HALF_A_REQUEST)
    await writer.drain()
    writer.transport.abort()
    await asyncio.sleep(0.1)
    assert engine.seen == []


async def test_a_storm_of_bad_requests_beside_good_ones(pair: Pair) -> None:
    router, engine = pair
    bad = [b"{", b"[]", json.dumps(chat(max_tokens=0)).encode(), json.dumps(chat() | {"model": "x"}).encode()]
    storm = [router.post(CHAT, bad[i % len(bad)]) for i in range(200)]
    good = [router.post(CHAT, chat()) for _ in range(20)]
    answers = await asyncio.gather(*storm, *good)
    assert {status for status, _, _ in answers[:200]} == {400, 404}
    assert {status for status, _, _ in answers[200:]} == {200}
    assert len(engine.seen) == 20


async def test_api_keys() -> None:
    settings = config(api_keys=ApiKeys(["one", "two"]))
    async with running_engine() as engine, running_router(settings) as router:
        for headers in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "Basic one"},
            {"Authorization": "one"},
        ):
            status, answer, got = await router.post(CHAT, chat(), headers=headers)
            assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
            assert got["www-authenticate"] == "Bearer"
            for page in ("/workers", "/debug/decisions", "/v1/models"):
                assert (await router.get(page, headers=headers))[0] == 401
        assert (await router.get("/healthz"))[0] == 200
        router.session.headers["Authorization"] = "Bearer two"
        await router.sidecar(engine)
        status, _, _ = await router.post(CHAT, chat())
        assert status == 200
        assert "Authorization" not in engine.seen[0].headers


async def test_a_wrong_count_of_decisions(pair: Pair) -> None:
    for wanted in ("0", "-1", "x"):
        status, text = await pair[0].get(f"/debug/decisions?last={wanted}")
        assert (status, wanted in text) == (400, True)
