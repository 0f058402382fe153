"""What the sender makes of answers, errors and silence, against an endpoint over real HTTP."""

from __future__ import annotations

import asyncio
import errno
import json
import time
from array import array
from collections.abc import Mapping

import aiohttp
import pytest

from kvrouting_core.routing.events import Outcome
from kvrouting_simulator.loadgen.apis import build_api
from kvrouting_simulator.loadgen.attempt import Attempt
from kvrouting_simulator.loadgen.failures import connection_failure
from kvrouting_simulator.loadgen.http_sender import FlushFailedError, HttpSender, flush_caches, worker_of
from kvrouting_simulator.workloads.work_item import ReadyRequest
from tests.fakes.endpoint import FakeEndpoint, Script, generate_events, serving


def ready(*prompt: int, output_tokens: int = 3) -> ReadyRequest:
    return ReadyRequest(
        request_id="r1",
        start_ms=0.0,
        prompt=array("I", prompt or (7, 8, 9)),
        output_tokens=output_tokens,
        session="s",
        turn=0,
    )


async def send(script: Script, *, api: str = "generate", timeout_s: float = 20.0) -> tuple[Attempt, FakeEndpoint]:
    def answer(_path: str, _body: Mapping[str, object]) -> Script:
        return script

    async with serving(answer) as endpoint, aiohttp.ClientSession() as session:
        sender = HttpSender(
            session=session,
            url=endpoint.url + "/",
            api=build_api(api, model="m", decode=lambda ids: " ".join(map(str, ids))),
            timeout_s=timeout_s,
            monotonic_s=time.monotonic,
        )
        return await sender.send(ready(), on_sent=lambda: None), endpoint


async def test_generate_reports_tokens_cache_and_worker() -> None:
    decision = json.dumps({"worker": "engine-2/0", "matched_tokens": 2})
    attempt, endpoint = await send(
        Script(
            events=generate_events(tokens=3, prompt_tokens=3, cached_tokens=2),
            headers={"x-kvrouting-decision": decision},
        )
    )
    assert attempt.outcome is Outcome.COMPLETED
    assert attempt.error is None
    assert attempt.token_ids.tolist() == [1, 2, 3]
    assert (attempt.output_tokens, attempt.prompt_tokens, attempt.cached_tokens) == (3, 3, 2)
    assert attempt.worker == "engine-2/0"
    assert attempt.first_token_s is not None
    assert attempt.first_token_s <= attempt.end_s
    path, body = endpoint.seen[0]
    assert path == "/generate"
    assert body["input_ids"] == [7, 8, 9]
    assert body["stream"] is True
    assert endpoint.request_ids == ["r1"]


async def test_completions_reads_counts_from_the_usage() -> None:
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}}
    attempt, endpoint = await send(
        Script(events=({"choices": [{"text": "a"}]}, {"choices": [{"text": "b"}]}, {"choices": [], "usage": usage})),
        api="completions",
    )
    assert (attempt.output_tokens, attempt.prompt_tokens, attempt.cached_tokens) == (2, 3, 1)
    path, body = endpoint.seen[0]
    assert path == "/v1/completions"
    assert body["prompt"] == [7, 8, 9]
    assert body["max_tokens"] == 3
    assert body["stream_options"] == {"include_usage": True}


async def test_chat_sends_text_and_the_role_is_no_token() -> None:
    attempt, endpoint = await send(
        Script(events=({"choices": [{"delta": {"role": "assistant", "content": ""}}]},)), api="chat"
    )
    assert attempt.outcome is Outcome.COMPLETED
    assert attempt.first_token_s is None
    assert attempt.output_tokens == 0
    assert endpoint.seen[0][1]["messages"] == [{"role": "user", "content": "7 8 9"}]

    attempt, _ = await send(Script(events=({"choices": [{"delta": {"content": "hi"}}]},)), api="chat")
    assert attempt.first_token_s is not None
    assert attempt.output_tokens == 1


async def test_a_refusal_keeps_status_and_words_and_is_not_a_loss() -> None:
    attempt, _ = await send(Script(status=429, body='{"error":\n {"message": "queue full"}}'))
    assert attempt.outcome is Outcome.REJECTED
    assert attempt.error == 'http_429: {"error": {"message": "queue full"}}'
    assert not attempt.cut


async def test_a_server_error_is_a_failure_that_is_not_sent_again() -> None:
    attempt, _ = await send(Script(status=503, body="no worker"))
    assert attempt.outcome is Outcome.FAILED
    assert attempt.error == "http_503: no worker"
    assert not attempt.cut


async def test_an_error_event_ends_the_answer_as_cut() -> None:
    events = (*generate_events(tokens=1, prompt_tokens=3), {"error": {"message": "worker died"}})
    attempt, _ = await send(Script(events=events))
    assert attempt.outcome is Outcome.FAILED
    assert attempt.error == "stream_error: worker died"
    assert attempt.cut
    assert attempt.output_tokens == 1


@pytest.mark.parametrize("script", [Script(done=False), Script(abort=True)], ids=["no end mark", "connection lost"])
async def test_a_broken_stream_is_cut(script: Script) -> None:
    script.events = generate_events(tokens=2, prompt_tokens=3)
    attempt, _ = await send(script)
    assert attempt.outcome is Outcome.FAILED
    assert attempt.error is not None
    assert attempt.error.startswith("stream_cut: ")
    assert attempt.cut
    assert attempt.output_tokens == 2


async def test_silence_ends_at_the_time_limit() -> None:
    script = Script(events=generate_events(tokens=1, prompt_tokens=3), silent=True)
    attempt, _ = await send(script, timeout_s=0.2)
    assert attempt.outcome is Outcome.FAILED
    assert attempt.error == "timeout: no whole answer within 0.2 s"


async def test_an_event_that_is_no_json_is_malformed() -> None:
    attempt, _ = await send(Script(events=("{nonsense",)))
    assert attempt.error is not None
    assert attempt.error.startswith("malformed: ")


async def error_of(url: str) -> str:
    async with aiohttp.ClientSession() as session:
        sender = HttpSender(
            session=session,
            url=url,
            api=build_api("generate", model="m"),
            timeout_s=20,
            monotonic_s=time.monotonic,
        )
        attempt = await sender.send(ready(), on_sent=lambda: None)
    assert attempt.outcome is Outcome.FAILED
    assert not attempt.cut
    return attempt.error or ""


async def test_nobody_listening_is_a_refused_connection(unused_tcp_port: int) -> None:
    assert (await error_of(f"http://127.0.0.1:{unused_tcp_port}")).startswith("connection_refused: ")
    assert (await error_of(f"http://localhost:{unused_tcp_port}")).startswith("connection_refused: ")


async def test_a_name_that_nobody_has_is_a_matter_of_dns() -> None:
    error = await error_of("http://nobody.invalid:80")
    assert error.startswith("dns: ")
    assert "nobody.invalid" in error


async def test_a_connection_that_ends_before_the_answer_was_reset() -> None:
    async def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async with await asyncio.start_server(hang_up, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        assert (await error_of(f"http://127.0.0.1:{port}")).startswith("connection_reset: ")


@pytest.mark.parametrize(
    ("number", "kind"),
    [(errno.ETIMEDOUT, "connection_timeout"), (errno.EHOSTUNREACH, "unreachable"), (0, "connection")],
)
def test_what_the_system_reports_has_a_kind(number: int, kind: str) -> None:
    assert connection_failure(OSError(number, "so it says")).startswith(f"{kind}: ")
    assert connection_failure(aiohttp.ClientError()) == "connection: ClientError"


async def test_caches_are_flushed_or_the_engine_is_named() -> None:
    def answer(path: str, _body: Mapping[str, object]) -> Script:
        return Script(status=200 if path == "/flush_cache" else 400, body="Cannot flush: busy")

    async with serving(answer) as endpoint, aiohttp.ClientSession() as session:
        await flush_caches(session, [endpoint.url, endpoint.url + "/"], timeout_s=20)
        assert [path for path, _ in endpoint.seen] == ["/flush_cache", "/flush_cache"]
        with pytest.raises(FlushFailedError, match="elsewhere/flush_cache answered 400: Cannot flush: busy"):
            await flush_caches(session, [endpoint.url + "/elsewhere"], timeout_s=20)


@pytest.mark.parametrize("header", ["", "no json", "[1]", '{"worker": 5}', "{}"])
def test_a_header_without_a_worker_names_none(header: str) -> None:
    assert worker_of({"x-kvrouting-decision": header}) is None
    assert worker_of({}) is None


def test_chat_without_a_tokenizer_is_refused() -> None:
    with pytest.raises(ValueError, match="tokenizer"):
        build_api("chat", model="m")
    with pytest.raises(ValueError, match="'grpc'"):
        build_api("grpc", model="m")


async def test_ids_may_come_as_all_so_far_or_as_what_is_new() -> None:
    new_only = tuple(
        {"output_ids": [count], "meta_info": {"completion_tokens": count, "prompt_tokens": 3}} for count in (1, 2, 3)
    )
    for events in (new_only, generate_events(tokens=3, prompt_tokens=3)):
        attempt, _ = await send(Script(events=events))
        assert attempt.token_ids.tolist() == [1, 2, 3]
