"""The simulated engine's frames, field by field, against those recorded from a real server (tests/data/sglang)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
import zmq
import zmq.asyncio

from tests.simulator.engine_under_test import Engine, running_engine

RECORDED = Path(__file__).parents[1] / "data" / "sglang"
EXCHANGES = {each["name"]: each for each in json.loads((RECORDED / "http.json").read_text())["exchanges"]}
OURS_ALONE = (
    ".simulated_worker_class",  # which model of time answers
    ".simulated_speed",
    ".internal_states[0].dp_rank",
    ".startup_time.scheduler_init",
    ".internal_states[0].startup_time.scheduler_init",  # one measured phase, where SGLang has its own
    ".usage.completion_tokens_details",  # a null that SGLang writes in most of its usage reports, not in this one
)
"""Fields that only the simulated engine has; no reader may need them."""

pytestmark = [pytest.mark.processes, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[Engine]:
    async with running_engine(
        "--context-length", "1024", "--served-model-name", "tiny", "--capacity-tokens", "2000", "--page-size", "1"
    ) as running:
        yield running


def kind(value: Any) -> str:
    """Its JSON type; whole and broken numbers are one."""
    return "number" if isinstance(value, (int, float)) and not isinstance(value, bool) else type(value).__name__


def unlike(ours: Any, real: Any, path: str = "") -> Iterator[str]:
    """What of ours is not in the real frame, or of another type there. A real null stands for any type."""
    if ours is None or real is None:
        return
    if kind(ours) != kind(real):
        yield f"{path}: {kind(ours)} instead of {kind(real)}"
    elif isinstance(ours, dict):
        for key, value in ours.items():
            if key not in real:
                yield f"{path}.{key} is not in the real frame"
            else:
                yield from unlike(value, real[key], f"{path}.{key}")
    elif isinstance(ours, list) and ours and real:
        for place, value in enumerate(ours):
            yield from unlike(value, real[min(place, len(real) - 1)], f"{path}[{place}]")


def parts(body: str, content_type: str) -> list[Any]:
    """The frame's JSON values: one, or one per streamed chunk with the end marker as text."""
    if content_type.startswith("text/event-stream"):
        chunks = [chunk.removeprefix("data: ") for chunk in body.split("\n\n") if chunk]
        return [chunk if chunk == "[DONE]" else json.loads(chunk) for chunk in chunks]
    return [json.loads(body)] if content_type == "application/json" else [body]


@pytest.mark.parametrize("name", EXCHANGES)
async def test_http_answers_have_the_fields_of_the_real_ones(engine: Engine, name: str) -> None:
    real = EXCHANGES[name]
    method = "GET" if real["sent"] is None else "POST"
    headers = {"content-type": "application/json"}
    async with engine.http.request(method, real["path"], data=real["sent"], headers=headers) as response:
        text = await response.text()
        assert response.status == real["status"], text
        content_type = response.headers.get("Content-Type", "")
    real_type = real["headers"].get("content-type", "")
    if real_type:
        assert content_type.split(";")[0] == real_type.split(";")[0]
    ours, theirs = parts(text, content_type), parts(real["body"], real_type)
    if real_type.startswith("text/event-stream"):
        assert (ours[-1] == "[DONE]") == (theirs[-1] == "[DONE]")
        assert shapes(ours) == shapes(theirs)
    differences = [
        difference
        for place, frame in enumerate(ours)
        for difference in unlike(frame, theirs[min(place, len(theirs) - 1)])
        if real_type and difference.split(" ")[0].rstrip(":") not in OURS_ALONE
    ]
    assert not differences


def shapes(frames: list[Any]) -> list[str]:
    """What each streamed frame is for, repeats left out: a role, text, the finish, the usage, the end."""
    told: list[str] = []
    for frame in frames:
        shape = _shape(frame)
        if not told or told[-1] != shape:
            told.append(shape)
    return told


def _shape(frame: Any) -> str:
    if not isinstance(frame, dict):
        return str(frame)
    if "meta_info" in frame:
        return "finish" if frame["meta_info"]["finish_reason"] else "text"
    if not frame["choices"]:
        return "usage"
    choice = frame["choices"][0]
    if choice["finish_reason"]:
        return "finish"
    return "role" if choice.get("delta", {}).get("role") else "text"


async def _published(
    family: str, engine: Engine, work: Callable[[], Awaitable[None]], *, enough: Callable[[bytes], bool]
) -> list[list[bytes]]:
    """What is published while the work is done, up to the payload that is enough."""
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.SUB)
    socket.setsockopt(zmq.SUBSCRIBE, b"")
    socket.connect(f"tcp://127.0.0.1:{engine.ports[family]}")
    number = 0
    while not await socket.poll(50):  # a subscription travels by itself
        number += 1
        await engine.generate(input_ids=[100_000 + number] * 20, sampling_params={"max_new_tokens": 1})
    await work()
    messages = [await socket.recv_multipart()]
    while not enough(messages[-1][-1]):
        messages.append(await asyncio.wait_for(socket.recv_multipart(), 30))
    socket.close(linger=0)
    context.term()
    return messages


def recorded(name: str) -> list[list[bytes]]:
    published = json.loads((RECORDED / name).read_text())["published"]
    return [[bytes.fromhex(frame) for frame in message] for message in published]


def fields_by_type(messages: list[list[bytes]]) -> dict[str, dict[str, set[str]]]:
    """Event type -> field -> the types seen in it."""
    seen: dict[str, dict[str, set[str]]] = {}
    for message in messages:
        for event in msgspec.msgpack.decode(message[-1])[1]:
            fields = seen.setdefault(event["type"], {})
            for name, value in event.items():
                fields.setdefault(name, set()).add(_element(value))
    return seen


def _element(value: Any) -> str:
    return f"list of {kind(value[0])}" if isinstance(value, list) and value else kind(value)


async def test_event_batches_have_the_fields_of_the_real_ones(engine: Engine) -> None:
    async def work() -> None:
        for number in range(9):
            await engine.generate(
                input_ids=[500 + number] * 300, sampling_params={"max_new_tokens": 2, "temperature": 0}
            )
        await engine.post("/generate", {"input_ids": list(range(20, 40)), "sampling_params": {"max_new_tokens": 1}})
        await engine.until_idle()
        async with engine.http.post("/flush_cache") as response:
            assert response.status == 200

    def flushed(payload: bytes) -> bool:
        return bool(msgspec.msgpack.decode(payload)[1][-1]["type"] == "AllBlocksCleared")

    ours, real = await _published("kv_events", engine, work, enough=flushed), recorded("events.json")
    assert {len(message) for message in ours} == {len(message) for message in real} == {3}
    assert {message[0] for message in ours} == {message[0] for message in real}
    assert {len(message[1]) for message in ours} == {len(message[1]) for message in real} == {8}
    for batches in (ours, real):
        assert {len(msgspec.msgpack.decode(message[2])) for message in batches} == {3}
    assert fields_by_type(ours) == fields_by_type(real)


async def test_load_reports_have_the_fields_of_the_real_ones(engine: Engine) -> None:
    async def work() -> None:
        await engine.generate(input_ids=[7] * 50, sampling_params={"max_new_tokens": 4})

    ours, real = await _published("load", engine, work, enough=lambda _: True), recorded("load.json")
    assert [[len(frame) for frame in message[:-1]] for message in ours[:1]] == [
        [len(frame) for frame in message[:-1]] for message in real[:1]
    ]
    assert ours[0][0] == real[0][0]
    decoded = [[kind(value) for value in msgspec.msgpack.decode(message[-1])] for message in (ours[0], real[0])]
    assert decoded[0] == decoded[1]


async def test_server_info_has_what_the_sidecar_reads(engine: Engine) -> None:
    ours, real = await engine.get("/server_info"), json.loads(EXCHANGES["GET /server_info"]["body"])
    wanted = {"version", "page_size", "max_total_num_tokens", "radix_cache_backend", "startup_time", "kv_events"}
    assert wanted <= set(ours)
    assert wanted <= set(real)
    assert set(ours["kv_events"]) == set(real["kv_events"])
