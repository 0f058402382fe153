"""Faults on order, and the life of the process: start, busy ports, end."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import struct
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import zmq
from click.testing import CliRunner

from kvrouting_simulator.engine_process.command import engine as command
from tests.engine_sockets import ask_state, connected
from tests.simulator.engine_under_test import (
    Engine,
    EventReader,
    launched,
    running_engine,
)

pytestmark = [pytest.mark.processes]
# Twelve seconds: however slow the machine, it is looked at while it runs.
LONG = {"max_new_tokens": 30_000}


async def running(engine: Engine, text: str) -> asyncio.Task[Any]:
    """A long request that is being served."""
    task = asyncio.create_task(engine.generate(text=text, sampling_params=LONG))
    while not (await engine.loads())["num_running_reqs"]:
        await asyncio.sleep(0.01)
    return task


async def serve(engine: Engine, *, first: int, prompts: int) -> None:
    """Serves prompts that no earlier one shares anything with: an event batch for each."""
    for number in range(first, first + prompts):
        await engine.generate(input_ids=[number] * 3, sampling_params={"max_new_tokens": 1})


async def connected_reader(engine: Engine, socket: Any) -> EventReader:
    """A reader that hears every batch from the next on."""
    number = 1000
    while not await socket.poll(50):
        await serve(engine, first=number, prompts=1)
        number += 1
    reader = EventReader(socket)
    (state,) = await ask_state(engine.ports["state"], "state")
    await reader.until(state["sequence"])
    return reader


async def test_a_stalled_engine_takes_requests_and_answers_when_it_moves_again() -> None:
    async with running_engine() as engine:
        await engine.misbehave("stall")
        waiting = asyncio.create_task(engine.generate(text="stalled", sampling_params={"max_new_tokens": 2}))
        healthy = asyncio.create_task(engine.get("/health"))
        while not (await engine.loads())["num_waiting_reqs"]:
            await asyncio.sleep(0.01)
        steps = (await engine.get("/steps"))["ranks"][0]["steps"]
        assert steps == 0
        assert not waiting.done()
        assert not healthy.done(), "health waits for the scheduler"
        await engine.misbehave("behave")
        assert len((await waiting)["output_ids"]) == 2
        await healthy

        await engine.misbehave("stall", seconds=0.2)
        assert len((await engine.generate(text="again", sampling_params={"max_new_tokens": 2}))["output_ids"]) == 2


async def test_a_dying_engine_leaves_its_streams_unfinished() -> None:
    async with running_engine() as engine:
        await engine.misbehave("die", after_tokens=20, exit_code=7)
        body = {"prompt": "last words", "max_tokens": 3000, "stream": True}
        received = bytearray()

        async def read() -> None:
            async with engine.http.post("/v1/completions", json=body) as response:
                async for data in response.content.iter_any():
                    received.extend(data)

        with pytest.raises(aiohttp.ClientError):
            await read()
        assert await engine.process.wait() == 7
    assert 0 < received.count(b"data: ") < 20
    assert b"[DONE]" not in received


async def test_cut_connections_are_the_clients_problem_alone() -> None:
    async with running_engine() as engine:
        await engine.misbehave("cut_connections", after_tokens=20)
        with pytest.raises(aiohttp.ClientError):
            await engine.generate(text="cut", sampling_params=LONG)
        await engine.until_idle()
        await engine.generate(text="after", sampling_params={"max_new_tokens": 40})


async def test_a_restart_in_place_is_a_new_epoch_with_nothing_cached() -> None:
    async with running_engine() as engine:
        await serve(engine, first=0, prompts=3)
        (before,) = await ask_state(engine.ports["state"], "state")
        startup = (await engine.get("/server_info"))["startup_time"]
        lost = await running(engine, "lost")
        with connected(zmq.SUB, engine.ports["kv_events"]) as subscriber:
            await connected_reader_among(engine, subscriber)
            await engine.misbehave("restart")
            with pytest.raises(aiohttp.ClientError):
                await lost
            (fresh,) = await ask_state(engine.ports["state"], "state")
            await serve(engine, first=1, prompts=2)
            reader = EventReader(subscriber)
            while reader.sequences[-1:] != [1]:
                await reader.read(1)
        replayed = []
        with connected(zmq.DEALER, engine.ports["replay"]) as client:
            await client.send_multipart([b"", struct.pack(">Q", 0)])
            while (frames := await asyncio.wait_for(client.recv_multipart(), 30))[2] != b"\xff" * 8:
                replayed.append(int.from_bytes(frames[2], "big"))
        load = await engine.loads()

        assert fresh["epoch"] != before["epoch"]
        assert (fresh["sequence"], fresh["pages"], fresh["digest"]) == (0, 0, 0)
        assert replayed == [0, 1], "nothing of the old process is replayed"
        assert reader.sequences[-2:] == [0, 1]
        assert load["total_prefill_uncached_tokens"] == 6, "counters start anew"
        assert (await engine.get("/server_info"))["startup_time"] != startup


async def connected_reader_among(engine: Engine, subscriber: Any) -> None:
    """Returns when the engine knows the subscriber, while it is busy with something else."""
    number = 1000
    while not await subscriber.poll(50):
        await serve(engine, first=number, prompts=1)
        number += 1


async def test_dropped_batches_are_a_gap_that_replay_fills_unless_told_otherwise() -> None:
    async with running_engine() as engine:
        with connected(zmq.SUB, engine.ports["kv_events"]) as subscriber:
            reader = await connected_reader(engine, subscriber)
            start = reader.sequences[-1] + 1
            await engine.misbehave("drop_events", batches=2)
            await serve(engine, first=0, prompts=3)
            await engine.misbehave("drop_events", batches=1, replay=False)
            await serve(engine, first=10, prompts=2)
            await engine.misbehave("drop_events", probability=1.0)
            await serve(engine, first=20, prompts=2)
            await engine.misbehave("behave")
            await serve(engine, first=30, prompts=1)
            await reader.until(start + 8)
            assert reader.sequences[-3:] == [start + 2, start + 4, start + 7]
        replayed = []
        with connected(zmq.DEALER, engine.ports["replay"]) as client:
            await client.send_multipart([b"", struct.pack(">Q", start)])
            while (frames := await asyncio.wait_for(client.recv_multipart(), 30))[2] != b"\xff" * 8:
                replayed.append(int.from_bytes(frames[2], "big") - start)
        assert replayed == [0, 1, 2, 4, 5, 6, 7]


async def test_duplicated_and_delayed_batches_keep_their_order() -> None:
    async with running_engine() as engine:
        with connected(zmq.SUB, engine.ports["kv_events"]) as subscriber:
            reader = await connected_reader(engine, subscriber)
            start = reader.sequences[-1] + 1
            await engine.misbehave("duplicate_events", batches=2)
            await serve(engine, first=0, prompts=3)
            await reader.read(5)
            await engine.misbehave("delay_events", seconds=3.0)
            await serve(engine, first=10, prompts=2)
            assert not await subscriber.poll(50), "late"
            await engine.misbehave("behave")
            await serve(engine, first=20, prompts=1)
            await reader.read(3)
        assert [n - start for n in reader.sequences[-8:]] == [0, 0, 1, 1, 2, 3, 4, 5]


async def test_a_silent_state_socket_and_refused_http() -> None:
    async with running_engine() as engine:
        await engine.misbehave("silence_state")
        with pytest.raises(TimeoutError):
            await ask_state(engine.ports["state"], "state", seconds=0.3)
        await engine.misbehave("behave")
        assert (await ask_state(engine.ports["state"], "state"))[0]["version"] == 1

        await engine.misbehave("refuse_http", status=502)
        await engine.get("/health", status=502)
        await engine.post("/generate", {"text": "a"}, status=502)
        await engine.misbehave("refuse_http", seconds=0)
        while (await engine.http.get("/health")).status != 200:
            await asyncio.sleep(0.01)


async def test_one_rank_can_misbehave_alone_and_nonsense_is_refused() -> None:
    async with running_engine("--dp-size", "2") as engine:
        await engine.misbehave("stall", dp_rank=1)
        body = {"text": "a", "sampling_params": {"max_new_tokens": 1}}
        await engine.generate(**body, routed_dp_rank=0)
        stuck = asyncio.create_task(engine.generate(**body, routed_dp_rank=1))
        while not (await engine.loads(1))["num_waiting_reqs"]:
            await asyncio.sleep(0.01)
        await engine.misbehave("behave")
        await stuck
        for fault in ({"action": "explode"}, {"action": "stall", "dp_rank": 2}, {"action": "die", "tokens": 1}):
            assert (await engine.post("/misbehave", fault, status=400))["message"]


async def test_faults_by_option_work_from_the_start_and_the_path_is_closed_unless_opened() -> None:
    fault = json.dumps({"action": "refuse_http", "status": 500})
    ports = [f"--{name}-port=0" for name in ("kv-events", "replay", "load", "state")]
    async with launched("--port", "0", *ports, "--misbehave", fault) as engine:
        await engine.get("/health", status=500)
    async with launched("--port", "0", *ports) as engine:
        await engine.post("/misbehave", {"action": "behave"}, status=404)


# ---- life ------------------------------------------------------------------------------------------------------------


async def test_sigterm_lets_running_requests_end_and_the_process_end_well() -> None:
    async with running_engine("--shutdown-seconds", "60") as engine:
        task = asyncio.create_task(engine.generate(text="finish me", sampling_params={"max_new_tokens": 3000}))
        while not (await engine.loads())["num_running_reqs"]:
            await asyncio.sleep(0.01)
        engine.process.send_signal(signal.SIGTERM)
        assert len((await task)["output_ids"]) == 3000
        assert await asyncio.wait_for(engine.process.wait(), 60) == 0


async def test_a_request_that_does_not_end_is_cut_after_the_grace() -> None:
    async with running_engine("--shutdown-seconds", "0.2", speed=1) as engine:
        task = await running(engine, "too long")
        engine.process.send_signal(signal.SIGINT)
        with pytest.raises(aiohttp.ClientError):
            await task
        assert await asyncio.wait_for(engine.process.wait(), 60) == 0


async def test_an_engine_without_the_plug_in_or_events_says_nothing_there() -> None:
    options = ("--no-kv-events", "--no-replay", "--no-load", "--no-state", "--eviction", "lru")
    async with running_engine(*options) as engine:
        assert {name: engine.ports[name] for name in ("kv_events", "replay", "load", "state")} == dict.fromkeys(
            ("kv_events", "replay", "load", "state")
        )
        info = await engine.get("/server_info")
        assert (info["kv_events"], info["radix_cache_backend"]) == (None, None)
        assert info["radix_eviction_policy"] == "lru"
        await engine.generate(text="still serves", sampling_params={"max_new_tokens": 1})


@pytest.mark.parametrize(
    ("option", "others"),
    [
        ("--port", []),
        ("--kv-events-port", ["--dp-size", "2"]),
        ("--replay-port", []),
        ("--load-port", []),
        ("--state-port", []),
    ],
)
def test_a_busy_port_is_named_with_its_option(option: str, others: list[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        base = port - 1 if others else port  # with two ranks the second one's port is busy
        arguments = [option, str(base), *others]
        for name in ("--port", "--kv-events-port", "--replay-port", "--load-port", "--state-port"):
            if name != option:
                arguments += [name, "0"]
        result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 1
    assert f":{port} " in result.output
    assert option in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kv-events-port", "5557", "--replay-port", "5558", "--dp-size", "2"], "port 5558 is claimed by"),
        (["--no-kv-events"], "replay needs KV events"),
        (["--misbehave", '{"action": "explode"}'], "no known misbehaviour"),
        (["--page-size", "64", "--chunked-prefill-size", "32"], "less than a page"),
        (["--tokenizer", "./nowhere"], "does not exist"),
        (["--eviction", "best"], "is not one of"),
        (["--worker-class", "nope"], "'nope' is not one of 'L40', 'L40-paper', 'L40S', 'H200'"),
    ],
)
def test_options_that_make_no_sense_are_explained(arguments: list[str], message: str) -> None:
    free = [f"--{name}-port=0" for name in ("kv-events", "replay", "load", "state")]
    result = CliRunner().invoke(command, ["--port", "0", *free, *arguments])
    assert result.exit_code != 0
    assert message in result.output


async def test_options_come_from_the_environment_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PORT", "KV_EVENTS_PORT", "REPLAY_PORT", "LOAD_PORT", "STATE_PORT"):
        monkeypatch.setenv(f"KVROUTING_ENGINE_{name}", "0")
    monkeypatch.setenv("KVROUTING_ENGINE_PAGE_SIZE", "32")
    async with launched() as engine:
        assert (await engine.get("/server_info"))["page_size"] == 32
        assert msgspec.json.encode(engine.ports)
