"""KV events, load and state socket of the running engine, read by plain ZeroMQ clients."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import struct
import sys
from typing import Any

import msgspec
import pytest
import zmq

from kvrouting_core.service_time import worker_class
from tests.engine_sockets import ask_state, connected
from tests.simulator.engine_under_test import (
    Engine,
    EventReader,
    apply_events,
    digest,
    running_engine,
)

pytestmark = [pytest.mark.processes]


def random_prompts(count: int, *, seed: int, longest: int = 400) -> list[list[int]]:
    """Prompts of which many share prefixes of each other."""
    rng = random.Random(seed)
    prompts: list[list[int]] = []
    for _ in range(count):
        shared = rng.choice(prompts)[: rng.randrange(1, longest)] if prompts and rng.random() < 0.6 else []
        prompts.append([*shared, *(rng.randrange(50_000) for _ in range(rng.randrange(1, longest)))])
    return prompts


async def serve_all(engine: Engine, prompts: list[list[int]], *, output_tokens: int = 3) -> None:
    """Sends all prompts, eight at a time."""
    gate = asyncio.Semaphore(8)

    async def one(prompt: list[int]) -> None:
        async with gate:
            await engine.generate(input_ids=prompt, sampling_params={"max_new_tokens": output_tokens})

    await asyncio.gather(*(one(prompt) for prompt in prompts))
    await engine.until_idle()


async def heard_from_the_start(engine: Engine, socket: Any) -> EventReader:
    """A reader whose subscription the engine has, with the cache empty and what it missed replayed."""
    reader = EventReader(socket)
    number = 0
    while not await socket.poll(50):  # a subscription travels by itself
        await engine.generate(input_ids=[100_000 + number] * 64, sampling_params={"max_new_tokens": 1})
        number += 1
    await engine.post("/flush_cache", None)
    (state,) = await ask_state(engine.ports["state"], "state")
    await reader.until(state["sequence"])
    assert reader.pages == set()
    return reader


async def replayed(engine: Engine, *, batches: int) -> list[list[bytes]]:
    """What replay gives, end included, once it has so many batches: those that the engine counts and that its
    publisher still has in its queue come a moment later."""
    async with asyncio.timeout(30):
        with connected(zmq.DEALER, engine.ports["replay"]) as socket:
            while True:
                answer: list[list[bytes]] = []
                await socket.send_multipart([b"", struct.pack(">Q", 0)])
                while not answer or answer[-1][2] != b"\xff" * 8:
                    answer.append(await socket.recv_multipart())
                if len(answer) > batches:
                    return answer


@pytest.mark.parametrize("page_size", [1, 16])
async def test_events_add_up_to_the_cache_and_its_digest(page_size: int) -> None:
    async with running_engine("--capacity-tokens", "3000", "--page-size", str(page_size)) as engine:
        with connected(zmq.SUB, engine.ports["kv_events"], topic=b"kv-events") as socket:
            reader = await heard_from_the_start(engine, socket)
            first = reader.sequences[-1] + 1
            for round_number in range(3):
                await serve_all(engine, random_prompts(25, seed=round_number))
                (state,) = await ask_state(engine.ports["state"], "state")
                await reader.until(state["sequence"])
                assert len(reader.pages) == state["pages"] == state["cached_tokens"] // page_size
                assert digest(reader.pages) == state["digest"]
            assert state["eviction"]["evicted_tokens"] > 0, "the prompts do not fit together"
            assert reader.sequences[first:] == list(range(reader.sequences[first], reader.sequences[-1] + 1))


async def test_events_tell_tokens_parents_and_the_rank_and_never_two_batches_for_a_step() -> None:
    async with running_engine("--dp-size", "2", "--page-size", "4") as engine:
        with connected(zmq.SUB, engine.ports["kv_events"] + 1, topic=b"kv-events") as socket:
            number = 0
            while not await socket.poll(50):
                await engine.generate(input_ids=[number] * 4, sampling_params={"max_new_tokens": 1}, routed_dp_rank=1)
                number += 1
            reader = EventReader(socket)
            prompt = list(range(1000, 1010))
            await engine.generate(input_ids=prompt, sampling_params={"max_new_tokens": 1}, routed_dp_rank=1)
            while True:
                (batch,) = await reader.read(1)
                if batch[1][0].get("token_ids", [])[:1] == [1000]:
                    break
            await engine.generate(
                input_ids=[*prompt[:4], 7, 7, 7, 7], sampling_params={"max_new_tokens": 1}, routed_dp_rank=1
            )
            (branch,) = await reader.read(1)

    (stored,) = batch[1]
    assert batch[2] == 1
    assert stored["token_ids"] == prompt[:8], "whole pages only"
    assert stored["block_size"] == 4
    assert stored["parent_block_hash"] is None
    assert all(-(2**63) <= page < 2**63 for page in stored["block_hashes"])
    assert branch[1][0]["parent_block_hash"] == stored["block_hashes"][0]


async def test_replay_gives_what_a_late_subscriber_missed() -> None:
    async with running_engine("--capacity-tokens", "3000") as engine:
        await serve_all(engine, random_prompts(20, seed=5))
        (state,) = await ask_state(engine.ports["state"], "state")
        *batches, end = await replayed(engine, batches=state["sequence"])
    pages: set[int] = set()
    sequences = []
    for empty, topic, sequence, payload in batches:
        assert (empty, topic) == (b"", b"kv-events")
        sequences.append(int.from_bytes(sequence, "big"))
        apply_events(pages, msgspec.msgpack.decode(payload)[1])

    assert end == [b"", b"", b"\xff" * 8, b""]
    assert sequences == list(range(state["sequence"]))
    assert (len(pages), digest(pages)) == (state["pages"], state["digest"])


async def test_a_snapshot_with_the_batches_after_it_is_the_cache_while_it_changes() -> None:
    async with running_engine("--capacity-tokens", "6000") as engine:
        with connected(zmq.SUB, engine.ports["kv_events"], topic=b"kv-events") as socket:
            reader = await heard_from_the_start(engine, socket)
            snapshots: list[list[dict[str, Any]]] = []
            # Work until the snapshots are of more than five different moments, however slow this machine answers.
            while len({chunks[0]["position"] for chunks in snapshots}) <= 5:
                work = asyncio.create_task(serve_all(engine, random_prompts(60, seed=9 + len(snapshots))))
                while not work.done():
                    snapshots.append(await ask_state(engine.ports["state"], "snapshot"))
                    await asyncio.sleep(0.01)
                await work
            (state,) = await ask_state(engine.ports["state"], "state")
            await reader.until(state["sequence"])
    batches = {int.from_bytes(f[1], "big"): msgspec.msgpack.decode(f[2])[1] for f in reader.frames}

    for chunks in snapshots:
        position = chunks[0]["position"]
        assert {(c["epoch"], c["position"]) for c in chunks} == {(state["epoch"], position)}
        pages: set[int] = set()
        for chunk in chunks:
            apply_events(pages, chunk["events"])
        for sequence in range(position, state["sequence"]):
            apply_events(pages, batches[sequence])
        assert (len(pages), digest(pages)) == (state["pages"], state["digest"])


async def test_a_large_snapshot_comes_in_chunks_and_links_every_page_to_its_parent() -> None:
    async with running_engine("--capacity-tokens", "100000", speed=1000) as engine:
        prompts = [[n] * 2 + list(range(2000)) for n in range(25)]
        await serve_all(engine, prompts, output_tokens=1)
        chunks = await ask_state(engine.ports["state"], "snapshot")
        (state,) = await ask_state(engine.ports["state"], "state")

    events = [event for chunk in chunks for event in chunk["events"]]
    pages = {page for event in events for page in event["block_hashes"]}
    assert len(chunks) > 3
    assert [bool(chunk.get("end")) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert len(pages) == sum(len(event["block_hashes"]) for event in events) == state["pages"]
    assert all(event["parent_block_hash"] in pages | {None} for event in events)


async def test_the_state_says_who_speaks_and_what_evicts() -> None:
    options = ("--eviction", "rlt", "--dp-size", "2", "--seed", "7", "--capacity-tokens", "500", "--page-size", "2")
    async with running_engine(*options) as engine:
        states = [(await ask_state(engine.ports["state"] + rank, "state"))[0] for rank in range(2)]
        odd = [await ask_state(engine.ports["state"], op) for op in ("snap", "")]
        with connected(zmq.DEALER, engine.ports["state"]) as socket:
            await socket.send_multipart([b"", b"\xc1 no msgpack"])
            unreadable = msgspec.msgpack.decode((await socket.recv_multipart())[1])

    assert [s["dp_rank"] for s in states] == [0, 1]
    assert len({s["epoch"] for s in states}) == 2
    assert states[1] == {
        "version": 1,
        "end": True,
        "epoch": states[1]["epoch"],
        "dp_rank": 1,
        "page_size": 2,
        "sequence": 0,
        "pages": 0,
        "digest": 0,
        "capacity_tokens": 500,
        "cached_tokens": 0,
        "events_port": engine.ports["kv_events"] + 1,
        "eviction": {"policy": "rlt", "live": True, "seed": 8, "phase": 1, "marked_tokens": 0, "evicted_tokens": 0},
    }
    assert all("unknown op" in body["error"] and body["end"] for (body,) in odd)
    assert "unknown op" in unreadable["error"]


async def test_an_engine_that_is_told_no_policy_shows_the_guarantee_of_rlt_adaptive_at_work() -> None:
    options = ("--capacity-tokens", "6400", "--page-size", "64")
    async with running_engine(*options, speed=1000) as engine:
        await serve_all(engine, [[n] * 640 for n in range(30)], output_tokens=1)
        (state,) = await ask_state(engine.ports["state"], "state")
    eviction = state["eviction"]
    assert (eviction["policy"], eviction["live"], eviction["safe_mode"]) == ("rlt-adaptive", True, False)
    assert eviction["own_loaded_tokens"] == eviction["ghost_loaded_tokens"] == 30 * 640
    assert eviction["evicted_tokens"] == 20 * 640
    assert eviction["phi_tokens"] <= eviction["phi_limit_tokens"] == 1600 < eviction["phi_bound_tokens"]


async def test_load_is_published_when_it_changes_and_each_second() -> None:
    async with running_engine("--dp-size", "2", speed=10) as engine:
        with connected(zmq.SUB, engine.ports["load"] + 1, topic=b"load") as socket:
            idle = [await asyncio.wait_for(socket.recv_multipart(), 30) for _ in range(2)]
            prompt = list(range(2000))
            await engine.generate(input_ids=prompt, sampling_params={"max_new_tokens": 2}, routed_dp_rank=1)
            loads = [msgspec.msgpack.decode(idle[-1][2])]
            while loads[-1][9] == 0 or loads[-1][1] > 0:
                loads.append(msgspec.msgpack.decode((await asyncio.wait_for(socket.recv_multipart(), 30))[2]))

    assert loads[0] == ["LoadStat", 0, 0, 0, 197_000, 1, 0, 0, 2048, 0, 0]
    assert 1 in {load[1] for load in loads}, "it was seen running"
    assert loads[-1][9] == 2000, "uncached prompt tokens"
    prefill_ms = worker_class("L40").times.prefill_ms([(0, 2000)])
    assert loads[-1][10] == pytest.approx(prefill_ms * 1000 / 10, abs=1), "busy time as the outside sees it"


READER_THAT_READS_NOTHING = """
import sys, time, zmq
context = zmq.Context()
sockets = []
for port in map(int, sys.argv[1:]):
    socket = context.socket(zmq.SUB)
    socket.subscribe(b"")
    socket.rcvhwm = 1
    socket.connect(f"tcp://127.0.0.1:{port}")
    sockets.append(socket)
assert sockets[0].poll(20000)
print("heard", flush=True)
time.sleep(600)
"""


async def test_a_stopped_reader_does_not_hold_a_single_step_up() -> None:
    async with running_engine("--capacity-tokens", "4000", "--kv-events-hwm", "5") as engine:
        reader = await asyncio.create_subprocess_exec(
            sys.executable, "-c", READER_THAT_READS_NOTHING, str(engine.ports["kv_events"]), str(engine.ports["load"]),
            stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            assert reader.stdout is not None
            last_seen = asyncio.create_task(reader.stdout.readline())
            number = 0
            while not last_seen.done():
                number += 1
                await engine.generate(input_ids=[number] * 3, sampling_params={"max_new_tokens": 1})
            os.kill(reader.pid, signal.SIGSTOP)
            before = (await engine.get("/steps"))["ranks"][0]["steps"]
            await serve_all(engine, random_prompts(60, seed=3))
            steps = (await engine.get("/steps"))["ranks"][0]
        finally:
            reader.kill()
            await reader.wait()
        (state,) = await ask_state(engine.ports["state"], "state")

    assert steps["steps"] > before + 20
    assert steps["blocked_event_batches"] == 0, "no batch waited for a place in the queue"
    assert state["sequence"] > number + 20, "far more than the reader's high-water mark"


async def test_clients_that_leave_at_random_cost_no_slot_and_no_event() -> None:
    options = ("--capacity-tokens", "5000", "--page-size", "4", "--enable-mixed-chunk", "--max-running-requests", "6")
    rng = random.Random(4)

    async def one(engine: Engine, number: int) -> None:
        prompt = [rng.randrange(40) for _ in range(rng.randrange(1, 900))]
        length = rng.randrange(1, 150)
        if number % 2:
            body = {"prompt": prompt, "max_tokens": length, "stream": True, "n": rng.choice([1, 2])}
            task = asyncio.create_task(engine.stream("/v1/completions", body))
        else:
            task = asyncio.create_task(engine.generate(input_ids=prompt, sampling_params={"max_new_tokens": length}))
        if rng.random() < 0.5:
            await asyncio.sleep(rng.random() * 0.2)
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async with running_engine(*options, "--chunked-prefill-size", "256") as engine:
        for _ in range(3):
            await asyncio.gather(*(one(engine, number) for number in range(30)))
            await engine.until_idle()
            assert (await engine.loads())["num_used_tokens"] == 0
        (state,) = await ask_state(engine.ports["state"], "state")
        *batches, _ = await replayed(engine, batches=state["sequence"])
    pages: set[int] = set()
    for frames in batches:
        apply_events(pages, msgspec.msgpack.decode(frames[3])[1])
    assert state["eviction"]["evicted_tokens"] > 0
    assert (len(pages), digest(pages)) == (state["pages"], state["digest"])
