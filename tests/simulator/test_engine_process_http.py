"""The HTTP surface of the simulated engine, spoken to as SGLang's clients speak."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio

from kvrouting_core.service_time import worker_class
from tests.fakes.tiny_tokenizer import write_tiny_tokenizer
from tests.simulator.engine_under_test import Engine, running_engine

pytestmark = [pytest.mark.processes, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[Engine]:
    """One engine for all tests of this module; each uses prompts of its own."""
    async with running_engine("--context-length", "50000", "--served-model-name", "llama") as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def client(engine: Engine) -> AsyncIterator[openai.AsyncOpenAI]:
    """The official client."""
    base = f"http://127.0.0.1:{engine.ports['http']}/v1"
    async with openai.AsyncOpenAI(base_url=base, api_key="none", max_retries=0) as one:
        yield one


def ids(first: int, count: int) -> list[int]:
    """A prompt that no other test uses, if `first` is not."""
    return list(range(first, first + count))


# ---- the official client ---------------------------------------------------------------------------------------------


async def test_chat_gives_an_answer_of_the_asked_length_with_usage(client: openai.AsyncOpenAI) -> None:
    messages: Any = [
        {"role": "system", "content": "be short"},
        {"role": "user", "content": [{"type": "text", "text": "what is"}, {"type": "text", "text": "a page?"}]},
    ]
    first = await client.chat.completions.create(model="llama", messages=messages, max_tokens=20)
    again = await client.chat.completions.create(model="llama", messages=messages, max_completion_tokens=20)

    choice = first.choices[0]
    assert choice.message.role == "assistant"
    assert choice.message.content is not None
    assert len(choice.message.content) == 20, "one byte a token"
    assert choice.finish_reason == "length"
    assert first.object == "chat.completion"
    assert first.usage is not None
    assert again.usage is not None
    prompt = "<|system|>\nbe short\n<|user|>\nwhat is a page?\n<|assistant|>\n"
    assert first.usage.prompt_tokens == len(prompt)
    assert first.usage.completion_tokens == 20
    assert again.choices[0].message.content == choice.message.content, "made up from the prompt alone"
    assert again.usage.prompt_tokens_details is not None
    assert again.usage.prompt_tokens_details.cached_tokens == len(prompt) - 1, "the last token is always computed"


async def test_chat_without_a_limit_stops_by_itself(client: openai.AsyncOpenAI) -> None:
    reply = await client.chat.completions.create(model="llama", messages=[{"role": "user", "content": "no limit"}])
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 128


async def test_a_chat_stream_has_openais_shape(client: openai.AsyncOpenAI, engine: Engine) -> None:
    messages: Any = [{"role": "user", "content": "stream it"}]
    whole = await client.chat.completions.create(model="llama", messages=messages, max_tokens=7)
    stream = await client.chat.completions.create(
        model="llama", messages=messages, max_tokens=7, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    lines = await engine.stream("/v1/chat/completions", {"messages": messages, "max_tokens": 7, "stream": True})

    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[0].choices[0].delta.content == ""
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 7
    assert lines[-1] == "[DONE]"
    without_usage = [json.loads(line) for line in lines[:-1]]
    assert all(chunk["choices"] and "usage" not in chunk for chunk in without_usage)


async def test_completions_take_texts_and_tokens_one_or_several(client: openai.AsyncOpenAI) -> None:
    lists: list[Any] = ["one text", ids(1000, 9), ["two", "texts"], [ids(2000, 5), ids(3000, 6)]]
    replies = [await client.completions.create(model="llama", prompt=p, max_tokens=3) for p in lists]

    assert [[c.index for c in r.choices] for r in replies] == [[0], [0], [0, 1], [0, 1]]
    assert [r.usage and r.usage.prompt_tokens for r in replies] == [8, 9, 8, 11]
    assert [r.usage and r.usage.completion_tokens for r in replies] == [3, 3, 6, 6]
    assert all(len(c.text) == 3 for r in replies for c in r.choices)


async def test_completions_default_to_sixteen_tokens(client: openai.AsyncOpenAI) -> None:
    reply = await client.completions.create(model="llama", prompt="default length")
    assert len(reply.choices[0].text) == 16
    assert reply.choices[0].finish_reason == "length"


async def test_several_answers_share_one_prefill(client: openai.AsyncOpenAI, engine: Engine) -> None:
    before = (await engine.loads())["total_prefill_uncached_tokens"]
    reply = await client.completions.create(model="llama", prompt=ids(5000, 300), n=3, max_tokens=8)
    computed = (await engine.loads())["total_prefill_uncached_tokens"] - before

    assert [c.index for c in reply.choices] == [0, 1, 2]
    assert len({c.text for c in reply.choices}) == 3
    assert reply.usage is not None
    assert reply.usage.prompt_tokens == 300, "counted once"
    assert reply.usage.completion_tokens == 24
    assert computed == 300 + 3, "the prompt once, then its last token for each answer"


async def test_streams_of_several_answers_keep_their_indexes(client: openai.AsyncOpenAI) -> None:
    whole = await client.completions.create(model="llama", prompt=["many", "more"], n=2, max_tokens=5)
    stream = await client.completions.create(model="llama", prompt=["many", "more"], n=2, max_tokens=5, stream=True)
    texts = ["", "", "", ""]
    ends: list[str | None] = [None] * 4
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            ends[choice.index] = choice.finish_reason or ends[choice.index]
    assert texts == [c.text for c in whole.choices]
    assert ends == ["length"] * 4


async def test_a_stop_string_ends_the_answer_before_it(client: openai.AsyncOpenAI) -> None:
    free = await client.completions.create(model="llama", prompt="stop here", max_tokens=60)
    word = free.choices[0].text.split()[2]
    stopped = await client.completions.create(model="llama", prompt="stop here", max_tokens=60, stop=[word, "€"])
    stream = await client.completions.create(model="llama", prompt="stop here", max_tokens=60, stop=word, stream=True)

    expected = free.choices[0].text.partition(word)[0]
    assert stopped.choices[0].text == expected
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.usage is not None
    assert stopped.usage.completion_tokens == len(expected) + len(word)
    assert "".join([c.choices[0].text async for c in stream]) == expected


async def test_models_are_listed_and_looked_up(client: openai.AsyncOpenAI) -> None:
    listed = await client.models.list()
    assert [model.id for model in listed.data] == ["llama"]
    assert (await client.models.retrieve("llama")).owned_by == "sglang"
    with pytest.raises(openai.NotFoundError) as caught:
        await client.models.retrieve("other")
    assert caught.value.code == "model_not_found"


async def test_errors_have_sglangs_shape(client: openai.AsyncOpenAI, engine: Engine) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.completions.create(model="llama", prompt=ids(0, 50_000))
    assert caught.value.body == {
        "object": "error",
        "message": "The input (50000 tokens) is longer than the model's context length (50000 tokens).",
        "type": "BadRequestError",
        "param": None,
        "code": 400,
    }
    assert (await engine.post("/generate", {"text": ""}, status=400)) == {
        "error": {"message": "Prompt cannot be empty"}
    }
    missing = await engine.get("/v1/nothing", status=404)
    assert (missing["object"], missing["code"]) == ("error", 404)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": "a", "echo": True}, "echo"),
        ({"prompt": "a", "extra_key": "k"}, "extra_key"),
        ({"prompt": "a", "logprobs": 1}, "logprobs"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "n": 0}, "n"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "routed_dp_rank": 1}, "routed_dp_rank"),
    ],
)
async def test_what_cannot_be_simulated_or_is_nonsense_is_refused_by_name(
    engine: Engine, body: Mapping[str, Any], param: str
) -> None:
    error = await engine.post("/v1/completions", body, status=400)
    assert error["param"] == param
    assert error["message"]


async def test_a_template_error_is_the_clients(engine: Engine) -> None:
    image = [{"type": "image_url", "image_url": {"url": "data:"}}]
    error = await engine.post("/v1/chat/completions", {"messages": [{"role": "user", "content": image}]}, status=400)
    assert "image_url" in error["message"]
    assert (await engine.post("/v1/chat/completions", {"messages": []}, status=400))["param"] == "messages"


async def test_a_client_that_leaves_its_stream_frees_its_slots(client: openai.AsyncOpenAI, engine: Engine) -> None:
    stream = await client.completions.create(model="llama", prompt=ids(7000, 50), max_tokens=40_000, stream=True)
    await anext(aiter(stream))
    assert (await engine.loads())["num_running_reqs"] == 1
    await stream.close()
    await engine.until_idle()
    assert (await engine.loads())["num_used_tokens"] == 0


async def test_a_client_that_leaves_while_it_waits_for_the_whole_answer_frees_its_slots(engine: Engine) -> None:
    body = {"input_ids": ids(8000, 50), "sampling_params": {"max_new_tokens": 40_000}}
    waiting = asyncio.create_task(engine.generate(**body))
    while not (await engine.loads())["num_running_reqs"]:
        await asyncio.sleep(0.01)
    waiting.cancel()
    await engine.until_idle()
    assert (await engine.loads())["num_used_tokens"] == 0


# ---- SGLang's own paths ----------------------------------------------------------------------------------------------


async def test_generate_tells_tokens_and_meta_info(engine: Engine) -> None:
    prompt = ids(10_000, 40)
    await engine.generate(input_ids=prompt, sampling_params={"max_new_tokens": 1})
    reply = await engine.generate(input_ids=prompt, sampling_params={"max_new_tokens": 6}, rid="mine")

    meta = reply["meta_info"]
    assert len(reply["output_ids"]) == 6
    assert reply["text"] == bytes(reply["output_ids"]).decode()
    assert meta["id"] == "mine"
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (40, 6, 39)
    assert meta["finish_reason"] == {"type": "length", "length": 6}
    assert meta["e2e_latency"] > 0


async def test_generate_takes_lists_and_defaults_to_128_tokens(engine: Engine) -> None:
    texts = await engine.generate(text=["list a", "list b"])
    tokens = await engine.generate(input_ids=[ids(11_000, 3), ids(12_000, 4)], sampling_params={"max_new_tokens": 2})

    assert [len(r["output_ids"]) for r in texts] == [128, 128]
    assert [r["meta_info"]["prompt_tokens"] for r in tokens] == [3, 4]
    await engine.post("/generate", {"text": "a", "input_ids": [1]}, status=400)
    await engine.post("/generate", {}, status=400)


async def test_generate_takes_sampling_params_for_each_prompt(engine: Engine) -> None:
    own = [{"max_new_tokens": 2}, {"max_new_tokens": 5}]
    replies = await engine.generate(text=["mine", "yours"], sampling_params=own)
    assert [len(r["output_ids"]) for r in replies] == [2, 5]
    twice = await engine.generate(text=["mine", "yours"], sampling_params=[{**one, "n": 2} for one in own])
    assert [len(r["output_ids"]) for r in twice] == [2, 2, 5, 5]
    events = await engine.stream("/generate", {"text": ["mine", "yours"], "sampling_params": own, "stream": True})
    last = {event["index"]: event for event in map(json.loads, events[:-1])}
    assert [last[index]["meta_info"]["completion_tokens"] for index in (0, 1)] == [2, 5]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"text": ["a", "b"], "sampling_params": [{}]}, "sampling_params has 1 entries for 2 prompts"),
        ({"text": "a", "sampling_params": [{}]}, "give a list of prompts"),
        ({"text": ["a", "b"], "sampling_params": [{"n": 2}, {}]}, "n must be the same"),
    ],
)
async def test_sampling_params_that_do_not_fit_the_prompts_are_refused(
    engine: Engine, body: dict[str, Any], message: str
) -> None:
    assert message in (await engine.post("/generate", body, status=400))["error"]["message"]


async def test_a_generate_stream_is_cumulative(engine: Engine) -> None:
    body = {"text": "flow", "sampling_params": {"max_new_tokens": 5}, "stream": True}
    *events, done = await engine.stream("/generate", body)
    whole = await engine.generate(text="flow", sampling_params={"max_new_tokens": 5})

    replies = [json.loads(event) for event in events]
    assert done == "[DONE]"
    assert [len(r["output_ids"]) for r in replies] == sorted({len(r["output_ids"]) for r in replies})
    assert all(whole["text"].startswith(r["text"]) for r in replies)
    assert replies[-1]["text"] == whole["text"]
    assert [r["meta_info"]["finish_reason"] for r in replies[:-1]] == [None] * (len(replies) - 1)
    assert replies[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 5}


async def test_an_aborted_request_ends_with_what_it_has(engine: Engine) -> None:
    body = {"text": "to be aborted", "sampling_params": {"max_new_tokens": 30_000}, "rid": "victim-1"}
    waiting = asyncio.create_task(engine.generate(**body))
    while not (await engine.loads())["num_running_reqs"]:
        await asyncio.sleep(0.01)
    await engine.post("/generate", body, status=400)  # the id is in use
    await engine.post("/abort_request", {"rid": "victim"})
    reply = await waiting
    assert reply["meta_info"]["finish_reason"]["type"] == "abort"
    assert len(reply["output_ids"]) < 30_000
    await engine.until_idle()


async def test_the_cache_is_flushed_only_when_nothing_runs(engine: Engine) -> None:
    prompt = ids(13_000, 64)
    await engine.generate(input_ids=prompt, sampling_params={"max_new_tokens": 1})
    running = asyncio.create_task(engine.generate(text="busy", sampling_params={"max_new_tokens": 30_000}, rid="busy"))
    while not (await engine.loads())["num_running_reqs"]:
        await asyncio.sleep(0.01)
    refused = await engine.get("/flush_cache", status=400)
    await engine.post("/abort_request", {"abort_all": True})
    await running
    await engine.until_idle()
    kept = await engine.generate(input_ids=prompt, sampling_params={"max_new_tokens": 1})
    await engine.post("/flush_cache", None)
    flushed = await engine.generate(input_ids=prompt, sampling_params={"max_new_tokens": 1})

    assert refused.startswith("Flush cache failed")
    assert kept["meta_info"]["cached_tokens"] == 63
    assert flushed["meta_info"]["cached_tokens"] == 0


async def test_equal_prompts_under_different_salts_or_adapters_share_nothing(engine: Engine) -> None:
    body: dict[str, Any] = {"prompt": ids(14_000, 30), "max_tokens": 1}
    spaces: list[dict[str, Any]] = [{}, {"cache_salt": "a"}, {"model": "llama:adapter"}, {"lora_path": "adapter"}]
    replies = [await engine.post("/v1/completions", {**body, **space}) for space in spaces]
    cached = [reply["usage"]["prompt_tokens_details"]["cached_tokens"] for reply in replies]
    assert cached == [0, 0, 0, 29], "an adapter is the same however it is named"


# ---- what watches the engine -----------------------------------------------------------------------------------------


async def test_server_info_tells_options_capacity_and_endpoints(engine: Engine) -> None:
    info = await engine.get("/server_info")
    assert info == await engine.get("/get_server_info")
    assert info["version"] == "0.5.23"
    assert info["radix_cache_backend"] == "rlt"
    assert (info["page_size"], info["dp_size"]) == (1, 1)
    assert info["max_total_num_tokens"] == 197_000
    assert info["served_model_name"] == "llama"
    assert info["startup_time"]
    scheduler = {
        "max_running_requests": 2048,
        "chunked_prefill_size": 8192,
        "max_prefill_tokens": 16384,
        "prefill_decode_interval": 0,
        "enable_mixed_chunk": False,
    }
    assert scheduler.items() <= info.items()
    assert info["kv_events"] == {
        "publisher": "zmq",
        "endpoint_host": "127.0.0.1",
        "endpoint_port_base": engine.ports["kv_events"],
        "topic": "kv-events",
        "block_size": 1,
        "dp_size": 1,
        "load_endpoint_port_base": engine.ports["load"],
        "load_topic": "load",
        "replay_endpoint_port_base": engine.ports["replay"],
    }


async def test_health_needs_no_more_than_a_moving_scheduler(engine: Engine) -> None:
    await engine.get("/health")
    await engine.get("/health_generate")
    assert (await engine.get("/model_info"))["is_generation"] is True


async def test_metrics_carry_sglangs_names(engine: Engine) -> None:
    await engine.generate(input_ids=ids(15_000, 100), sampling_params={"max_new_tokens": 2})
    text = await engine.get("/metrics")
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#"))
    labels = 'dp_rank="0",engine_type="unified",model_name="llama"'
    for name in (
        "num_running_reqs", "num_queue_reqs", "token_usage", "max_total_num_tokens", "prompt_tokens_total",
        "cached_tokens_total", "generation_tokens_total", "evicted_tokens_total",
    ):  # fmt: skip
        assert f"sglang:{name}{{{labels}}}" in values, name
    assert float(values[f"sglang:max_total_num_tokens{{{labels}}}"]) == 197_000
    assert float(values[f"sglang:prompt_tokens_total{{{labels}}}"]) >= 100
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds"):
        assert float(values[f'sglang:{name}_count{{engine_type="unified",model_name="llama"}}']) >= 1


async def test_steps_are_recorded_with_plan_and_lateness(engine: Engine) -> None:
    await engine.generate(input_ids=ids(16_000, 500), sampling_params={"max_new_tokens": 4})
    recent = (await engine.get("/steps"))["ranks"][0]["recent"][-4:]
    assert [step["kind"] for step in recent] == ["prefill", "decode", "decode", "decode"]
    assert recent[0]["duration_ms"] == pytest.approx(worker_class("L40").times.prefill_ms([(0, 500)]))
    for step, following in itertools.pairwise(recent):
        assert following["start_ms"] == pytest.approx(step["start_ms"] + step["duration_ms"]), "no drift"
    assert all(step["late_ms"] >= 0 and step["publish_ms"] >= 0 for step in recent)


# ---- other engines ---------------------------------------------------------------------------------------------------


async def test_ranks_are_engines_of_their_own_behind_one_port() -> None:
    async with running_engine("--dp-size", "3") as engine:
        prompt = ids(0, 50)
        sent = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 1}}
        first = await engine.generate(**sent, routed_dp_rank=2)
        again = await engine.generate(**sent, routed_dp_rank=2)
        elsewhere = await engine.generate(**sent, routed_dp_rank=1)
        by_header = await engine.post(
            "/v1/completions", {"prompt": prompt, "max_tokens": 1}, headers={"X-Data-Parallel-Rank": "2"}
        )
        spread = [await engine.generate(text=f"any {n}", sampling_params={"max_new_tokens": 1}) for n in range(3)]
        bad_header = {"X-Data-Parallel-Rank": "x"}
        await engine.post("/v1/completions", {"prompt": prompt}, status=400, headers=bad_header)
        await engine.post("/generate", {**sent, "routed_dp_rank": 3}, status=400)

        assert [r["meta_info"]["dp_rank"] for r in (first, again, elsewhere)] == [2, 2, 1]
        assert [r["meta_info"]["cached_tokens"] for r in (first, again, elsewhere)] == [0, 49, 0]
        assert by_header["usage"]["prompt_tokens_details"]["cached_tokens"] == 49
        assert sorted(r["meta_info"]["dp_rank"] for r in spread) == [0, 1, 2]
        assert [load["dp_rank"] for load in (await engine.get("/v1/loads"))["loads"]] == [0, 1, 2]
        assert (await engine.get("/server_info"))["kv_events"]["dp_size"] == 3


async def test_a_models_own_tokenizer_and_template_are_used(tmp_path: Path) -> None:
    folder = write_tiny_tokenizer(tmp_path / "tokenizer")
    async with running_engine("--tokenizer", str(folder), "--no-cache-report") as engine:
        body = {"messages": [{"role": "user", "content": "the tail of a leaf"}], "max_tokens": 40}
        reply = await engine.post("/v1/chat/completions", body)
        lines = await engine.stream("/v1/chat/completions", {**body, "stream": True})
        native = await engine.generate(text="the tail of a leaf", sampling_params={"max_new_tokens": 9})

        text = reply["choices"][0]["message"]["content"]
        assert text.isascii()
        assert len(text.split()) > 3, "readable"
        assert reply["usage"]["completion_tokens"] == 40
        assert reply["usage"]["prompt_tokens_details"] is None, "not told unless asked for, as in SGLang"
        deltas = [json.loads(line)["choices"][0]["delta"] for line in lines[:-1]]
        assert "".join(delta.get("content", "") for delta in deltas) == text
        assert native["meta_info"]["prompt_tokens"] < len("the tail of a leaf")
        await engine.post("/v1/chat/completions", {"messages": [{"role": "wizard", "content": "x"}]}, status=400)


async def test_a_request_beyond_the_cache_is_refused_with_both_numbers() -> None:
    async with running_engine("--capacity-tokens", "100") as engine:
        error = await engine.post("/v1/completions", {"prompt": ids(0, 90), "max_tokens": 20}, status=400)
        assert "110" in error["message"]
        assert "100" in error["message"]
        await engine.generate(input_ids=ids(0, 60), sampling_params={"max_new_tokens": 20})
