"""The router's pure parts against slow, obvious definitions."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrouting_core.blocks import ChainHasher, Namespace
from kvrouting_core.identity import WorkerId
from kvrouting_core.prefix_index import PrefixIndex
from kvrouting_router.error_bodies import ErrorShape, error_body, error_event, error_headers
from kvrouting_router.errors import (
    HTTP_STATUS,
    BodyTooLargeError,
    NotReadyError,
    NoWorkerReadyError,
    OverloadedError,
    RouterError,
    StoppingError,
    UnknownModelError,
    UpstreamTimeoutError,
    http_status,
)
from kvrouting_router.guessed_cache import GuessedCache, PoolCache
from kvrouting_router.options import BreakerOptions, RoutingOptions, SizeLimits, SyncOptions, TimeLimits
from kvrouting_router.prompt_reading import PromptReader, text_as_tokens, text_of
from kvrouting_router.request_forms import Api, ChatPrompt, TextPrompt, parse_form
from kvrouting_router.sse import EventSplitter
from kvrouting_router.upstream import pinned_to_rank
from kvrouting_router.usage import StreamedTokens, Usage, usage_of_body, usage_of_stream
from kvrouting_tokenization import ByteTokenizer

# --- events of a stream ---


@given(
    events=st.lists(st.sampled_from([b"data: a\n\n", b"data: b\r\n\r\n", b": c\n\n", b"data: {}\ndata: {}\n\n"])),
    tail=st.sampled_from([b"", b"data: hal", b"data: x\n"]),
    cuts=st.lists(st.integers(0, 200)),
)
def test_a_stream_is_cut_only_between_events_and_nothing_is_lost(
    events: list[bytes], tail: bytes, cuts: list[int]
) -> None:
    stream = b"".join(events) + tail
    points = sorted({0, len(stream), *(c for c in cuts if c < len(stream))})
    splitter = EventSplitter()
    sent = b""
    for start, end in pairwise(points):
        sent += splitter.feed(stream[start:end])
        whole = 0
        for event in events:  # everything that is complete so far has been sent, and nothing more
            if whole + len(event) > end:
                break
            whole += len(event)
        assert len(sent) == whole
    assert sent + splitter.rest() == stream


def test_something_endless_that_is_no_event_is_passed_on() -> None:
    splitter = EventSplitter()
    assert splitter.feed(b"x" * (1 << 20)) == b""
    assert len(splitter.feed(b"xx")) == (1 << 20) + 2


# --- usage ---


def test_usage_of_whole_answers() -> None:
    details: dict[str, Any] = {"usage": {"completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 5}}}
    assert usage_of_body(Api.CHAT, json.dumps(details).encode()) == Usage(output_tokens=3, cached_tokens=5)
    details["usage"]["prompt_tokens_details"] = None
    assert usage_of_body(Api.COMPLETIONS, json.dumps(details).encode()) == Usage(output_tokens=3)
    batch = [{"meta_info": {"completion_tokens": i, "cached_tokens": 10}} for i in (1, 2)]
    assert usage_of_body(Api.GENERATE, json.dumps(batch).encode()) == Usage(output_tokens=3, cached_tokens=20)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"{}", b'{"usage":7}', b'{"meta_info":[]}', b"\xff"])
@pytest.mark.parametrize("api", list(Api))
def test_foreign_answers_give_no_usage(api: Api, body: bytes) -> None:
    assert usage_of_body(api, body) == Usage()


def chunk(**delta: object) -> bytes:
    """One event as SGLang writes it: compact, with its nulls."""
    everything = {"role": None, "content": None, "reasoning_content": None, "tool_calls": None, **delta}
    choice = {"index": 0, "delta": everything, "logprobs": None, "finish_reason": None}
    return b"data: " + json.dumps({"choices": [choice], "usage": None}, separators=(",", ":")).encode() + b"\n\n"


def test_a_stream_without_usage_is_counted_by_its_deltas() -> None:
    call = {"index": 0, "function": {"name": "f", "arguments": ""}}
    arguments = {"index": 0, "function": {"arguments": "{"}}
    events = [
        chunk(role="assistant", content=""),
        chunk(reasoning_content="so"),
        chunk(content=' "content":"x" '),  # a text that looks like a field
        chunk(content='"'),
        chunk(tool_calls=[call]),
        chunk(tool_calls=[arguments]),
        chunk(content=None),
        b"data: [DONE]\n\n",
    ]
    tokens = StreamedTokens(Api.CHAT)
    tokens.take(events[0])
    tokens.take(b"".join(events[1:]))
    assert tokens.usage([]) == Usage(output_tokens=4)
    assert tokens.usage([b'{"usage":{"completion_tokens":9}}']) == Usage(output_tokens=9)


def test_completions_are_counted_too_and_nothing_is_learned_from_nothing() -> None:
    tokens = StreamedTokens(Api.COMPLETIONS)
    assert tokens.usage([]) == Usage()
    tokens.take(b'data: {"choices": [{"index": 0, "text": "a"}, {"index": 1, "text": "b"}]}\n\n')
    tokens.take(b'data: {"choices": [{"index": 0, "text": "", "finish_reason": "stop"}]}\n\n')
    assert tokens.usage([]) == Usage(output_tokens=2)


def test_usage_of_a_stream_is_the_newest() -> None:
    payloads = [b'{"choices":[]}', b'{"usage":{"completion_tokens":2}}', b'{"usage":{"completion_tokens":1}}']
    assert usage_of_stream(Api.CHAT, payloads) == Usage(output_tokens=2)
    assert usage_of_stream(Api.CHAT, []) == Usage()


# --- errors ---


def test_the_table_lists_every_error_that_is_raised_for_a_client() -> None:
    def below(kind: type[RouterError]) -> set[type[RouterError]]:
        return {kind}.union(*map(below, kind.__subclasses__()))

    assert below(RouterError) - {RouterError} == set(HTTP_STATUS)


def test_what_the_table_does_not_list_is_our_fault_and_shows_nothing_of_it() -> None:
    assert http_status(ValueError("secret")) == 500
    body = json.loads(error_body(ValueError("secret"), ErrorShape.OPENAI))
    assert "secret" not in body["error"]["message"]
    assert body["error"]["type"] == "server_error"


def test_error_objects_of_both_apis() -> None:
    error = UnknownModelError("no such model")
    openai = {"message": "no such model", "type": "invalid_request_error", "param": None, "code": "model_not_found"}
    assert json.loads(error_body(error, ErrorShape.OPENAI)) == {"error": openai}
    assert json.loads(error_body(error, ErrorShape.SGLANG)) == {"error": {"message": "no such model"}}
    assert error_event(error, ErrorShape.SGLANG) == b'data: {"error":{"message":"no such model"}}\n\n'
    assert (http_status(BodyTooLargeError("x")), http_status(UpstreamTimeoutError("x"))) == (413, 504)


@pytest.mark.parametrize(("retry_after_s", "header"), [(0.0, "1"), (0.2, "1"), (1.2, "2"), (9.7, "10"), (3.0, "3")])
def test_retry_after_is_whole_seconds(retry_after_s: float, header: str) -> None:
    assert error_headers(OverloadedError("x", retry_after_s=retry_after_s)) == {"Retry-After": header}


def test_every_503_says_when_to_come_again() -> None:
    assert error_headers(NoWorkerReadyError("x")) == {"Retry-After": "5"}
    assert error_headers(NotReadyError("x")) == {"Retry-After": "5"}
    assert error_headers(StoppingError("x")) == {"Retry-After": "1"}


# --- forms ---


def test_namespaces_of_forms() -> None:
    cases: list[tuple[Mapping[str, object], Namespace]] = [
        ({"model": "a/b:c"}, Namespace(model="a/b", lora_adapter="c")),
        ({"model": "a/b", "lora_path": "x"}, Namespace(model="a/b", lora_adapter="x")),
        ({"model": "default", "cache_salt": "s"}, Namespace(model="a/b", cache_salt="s")),
        ({"cache_salt": "s", "extra_key": "k"}, Namespace(model="a/b\0k", cache_salt="s")),
        ({"extra_key": ["k", "l"], "lora_path": [None, "x"]}, Namespace(model="a/b\0k")),
        ({"cache_salt": "", "lora_path": ""}, Namespace(model="a/b")),
    ]
    for body, namespace in cases:
        assert parse_form(Api.COMPLETIONS, {"prompt": "x", **body}, model="a/b", max_sequences=8).namespace == namespace


def test_sequences_are_prompts_times_n() -> None:
    form = parse_form(Api.COMPLETIONS, {"prompt": ["a", "b", "c"], "n": 2, "max_tokens": 4}, model="m", max_sequences=8)
    assert (form.sequences, len(form.further), form.max_output_tokens) == (6, 2, 4)
    body: Mapping[str, object] = {"text": ["a", "b"], "sampling_params": {"n": 3, "max_new_tokens": 0}}
    form = parse_form(Api.GENERATE, body, model="m", max_sequences=8)
    assert (form.sequences, form.max_output_tokens) == (6, 0)
    body = {"messages": [{"role": "user"}], "max_tokens": 9, "max_completion_tokens": 5}
    assert parse_form(Api.CHAT, body, model="m", max_sequences=8).max_output_tokens == 5


# --- prompts ---

HASHER = ChainHasher(b"k" * 32, 16)


def reader() -> PromptReader:
    return PromptReader(hasher=HASHER, executor=ThreadPoolExecutor(1), tokenizer=None)


@given(a=st.text(), b=st.text(), c=st.text())
def test_texts_with_a_common_prefix_give_tokens_with_a_common_prefix(a: str, b: str, c: str) -> None:
    first, second = (text_as_tokens((a + end).encode("utf-8", "replace")).tolist() for end in (b, c))
    common = len(a.encode("utf-8", "replace")) // 4
    assert first[:common] == second[:common]


@given(st.lists(st.text(min_size=1), min_size=1, max_size=6))
def test_a_longer_conversation_begins_with_the_bytes_of_the_shorter(texts: list[str]) -> None:
    messages = [{"role": "user", "content": t.encode("utf-8", "ignore").decode()} for t in texts]
    whole = text_of(ChatPrompt(body={"messages": messages}))
    for turns in range(1, len(messages)):
        assert whole.startswith(text_of(ChatPrompt(body={"messages": messages[:turns]})))


def test_other_prompts_of_a_list_are_weighed() -> None:
    ids = parse_form(Api.COMPLETIONS, {"prompt": [[1] * 20, [2] * 30]}, model="m", max_sequences=8)
    read = reader().read_now(ids)
    assert (read.prompt_tokens, read.further_prompt_tokens, read.exact, len(read.blocks)) == (20, 30, True, 1)
    texts = reader().read_now(parse_form(Api.COMPLETIONS, {"prompt": ["x" * 40, "y" * 80]}, model="m", max_sequences=8))
    assert (texts.prompt_tokens, texts.further_prompt_tokens, texts.exact) == (10, 20, False)
    empty = reader().read_now(parse_form(Api.COMPLETIONS, {"prompt": ["", "y" * 80]}, model="m", max_sequences=8))
    assert (empty.prompt_tokens, empty.further_prompt_tokens, empty.blocks) == (1, 20, [])


def test_guessed_text_never_matches_token_ids() -> None:
    text = parse_form(Api.COMPLETIONS, {"prompt": "abcd" * 16}, model="m", max_sequences=8)
    ids = parse_form(Api.COMPLETIONS, {"prompt": text_as_tokens(b"abcd" * 16).tolist()}, model="m", max_sequences=8)
    assert reader().read_now(text).blocks != reader().read_now(ids).blocks


class RefusingTokenizer:
    """A template that takes nothing."""

    fingerprint = "f"

    def encode_prompt(self, text: str) -> Sequence[int]:
        return [1] * len(text)

    def encode_chat(self, body: Mapping[str, object]) -> Sequence[int]:
        raise ValueError("no system role, please")


def test_a_chat_that_the_template_refuses_is_routed_by_its_text() -> None:
    form = parse_form(Api.CHAT, {"messages": [{"role": "system", "content": "x" * 400}]}, model="m", max_sequences=8)
    tokenizing = PromptReader(hasher=HASHER, executor=ThreadPoolExecutor(1), tokenizer=RefusingTokenizer())
    read = tokenizing.read_now(form)
    assert not read.exact
    assert read.prompt_tokens > 100


class NoThreads(Executor):
    """Counts what it is asked to do, and does it."""

    def __init__(self) -> None:
        self.asked = 0

    def submit(self, work: Any, /, *arguments: Any, **named: Any) -> Future[Any]:
        self.asked += 1
        done: Future[Any] = Future()
        done.set_result(work(*arguments, **named))
        return done


@pytest.mark.parametrize(
    ("api", "body", "on_the_loop"),
    [
        (Api.COMPLETIONS, {"prompt": "x" * 512}, True),
        (Api.COMPLETIONS, {"prompt": "x" * 513}, False),
        (Api.COMPLETIONS, {"prompt": [1] * 2048}, True),
        (Api.COMPLETIONS, {"prompt": [1] * 2049}, False),
        (Api.CHAT, {"messages": [{"role": "user", "content": "x" * 200}] * 2}, True),
        (Api.CHAT, {"messages": [{"role": "user", "content": "x" * 200}] * 3}, False),
        (Api.CHAT, {"messages": [{"role": "user", "content": "x"}] * 100}, False),
        (Api.CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "x" * 9999}]}]}, False),
        (Api.CHAT, {"messages": [{"role": "user", "content": "x", "name": "y" * 9999}]}, False),
        (Api.CHAT, {"messages": [{"role": "user", "content": "x"}], "tools": [{"z": "y" * 9999}]}, False),
        (Api.CHAT, {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"a": 1}}, False),
    ],
)
async def test_only_what_is_surely_quick_is_tokenized_on_the_loop(
    api: Api, body: Mapping[str, Any], on_the_loop: bool
) -> None:
    threads = NoThreads()
    tokenizing = PromptReader(hasher=HASHER, executor=threads, tokenizer=ByteTokenizer())
    form = parse_form(api, body, model="m", max_sequences=8)
    assert await tokenizing.read(form) == tokenizing.read_now(form)
    assert threads.asked == (0 if on_the_loop else 1)


def test_a_rank_is_added_as_the_last_field() -> None:
    for body in (b'{"text":"x"}', b' {"text":"x" } \n', b'{"text":"x","routed_dp_rank":9}'):
        pinned = pinned_to_rank(body, 3)
        assert json.loads(pinned) == {"text": "x", "routed_dp_rank": 3}
        assert pinned.startswith(body.rstrip()[:-1])
    assert pinned_to_rank(b"{ }", 1) == b'{ "routed_dp_rank":1}'


# --- guesses ---


@settings(max_examples=60)
@given(st.integers(0, 10_000), st.integers(1, 12))
def test_guesses_are_bounded_and_prefix_closed(seed: int, capacity: int) -> None:
    """Against the definition: the newest chains, cut to the capacity by dropping what is oldest and has no child."""
    rng = random.Random(seed)
    cache, worker = GuessedCache(), WorkerId("w/0")
    parent: dict[int, int] = {}
    last_used: dict[int, int] = {}
    for step in range(30):
        chain = [1]
        for _ in range(rng.randrange(6)):
            chain.append(chain[-1] * 3 + rng.randrange(3))
        chain = chain[:capacity]
        parent.update(zip(chain[1:], chain, strict=False))
        for block in chain:
            last_used[block] = step
        while len(last_used) > capacity:
            leaves = [b for b in last_used if not any(parent.get(o) == b for o in last_used)]
            del last_used[min(leaves, key=lambda b: last_used[b])]
        cache.served(worker, chain, capacity_blocks=capacity)
        assert cache.count(worker) == len(last_used)
        assert cache.match(chain).get(worker, 0) == len(chain)
        for block in [b for b in parent if cache.match([b])]:
            assert cache.match([parent[block]])


def test_the_longer_of_both_views_counts() -> None:
    exact, guessed = PrefixIndex(), GuessedCache()
    cache = PoolCache(exact=exact, guessed=guessed)
    a, b = WorkerId("a/0"), WorkerId("b/0")
    exact.add(a, [1])
    assert cache.match([1, 2, 3]) == {a: 1}
    guessed.served(a, [1, 2], capacity_blocks=9)
    guessed.served(b, [1, 2, 3], capacity_blocks=9)
    exact.add(b, [1])
    assert cache.match([1, 2, 3]) == {a: 2, b: 3}
    assert (cache.count(a), cache.count(b), len(guessed)) == (1, 1, 3)
    guessed.drop(b)
    assert cache.match([1, 2, 3]) == {a: 2, b: 1}


# --- options ---


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: TimeLimits(idle_s=0), "idle_s must be positive, got 0"),
        (lambda: SizeLimits(max_body_bytes=0), "max_body_bytes must be positive"),
        (lambda: SizeLimits(max_sequences=0), "max_sequences must be positive, got 0"),
        (lambda: SizeLimits(max_header_bytes=10), "max_header_bytes must be at least 1024, got 10"),
        (lambda: SizeLimits(decision_header_bytes=1), "decision_header_bytes must be at least 256"),
        (lambda: SyncOptions(silence_s=5, gone_s=5), "gone_s 5 must exceed silence_s 5"),
        (lambda: SyncOptions(silence_s=1, heartbeat_interval_s=2), "must exceed heartbeat_interval_s"),
        (lambda: BreakerOptions(probe_s=9, max_probe_s=3), "max_probe_s 3 must be at least probe_s 9"),
        (lambda: RoutingOptions(audit_every=-1), "audit_every must not be negative, got -1"),
        (lambda: RoutingOptions(kept_decisions=0), "kept_decisions must be at least 1"),
    ],
)
def test_options_that_make_no_sense_are_refused(make: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make()


def test_a_prompt_of_text_is_its_bytes() -> None:
    assert text_of(TextPrompt(text="é\ud800")) == "é?".encode()
