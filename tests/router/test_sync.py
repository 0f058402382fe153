"""The sync stream on real sockets: joining, snapshots, deltas, doubts, epochs, silence, draining."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import grpc
import grpc.aio
import pytest

from kvrouting_core.identity import WorkerId
from tests.fakes.fake_http_engine import running_engine
from tests.fakes.fake_sidecar import fake_sidecar
from tests.router.router_under_test import (
    blocks_of,
    config,
    options,
    running_router,
    text_blocks,
)

A = WorkerId("pod-a/0")


def decision_of(headers: dict[str, str]) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(headers["x-kvrouting-decision"])
    return value


def chosen(decision: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = next(c for c in decision["candidates"] if c["worker"] == decision["worker"])
    return found


async def test_the_worker_that_holds_the_prefix_is_known_to() -> None:
    text = "a long prefix of the first request " * 8
    held = text_blocks(text)
    async with running_engine() as one, running_engine() as two, running_router(config(policy="lbgr")) as router:
        await router.sidecar(one)
        warm = await router.sidecar(two, pod_uid="pod-b")
        await warm.delta(extended=[(0, held)])
        await warm.acks(2)
        status, _, headers = await router.post("/v1/completions", {"model": "m", "prompt": text + " and more"})
        assert status == 200
        decision = decision_of(headers)
        assert decision["worker"] == "pod-b/0"
        assert chosen(decision)["matched_tokens"] == len(held) * 16
        assert len(two.seen) == 1


async def test_a_whole_match_still_leaves_one_token_to_compute() -> None:
    tokens = list(range(64))
    async with running_engine() as engine, running_router(config(policy="lbgr")) as router:
        sidecar = await router.sidecar(engine)
        await sidecar.delta(extended=[(0, blocks_of(tokens))])
        await sidecar.acks(2)
        _, _, headers = await router.post("/v1/completions", {"model": "m", "prompt": tokens})
        assert chosen(decision_of(headers))["matched_tokens"] == 63


@pytest.mark.parametrize(
    "fields",
    [{"lora_path": "ad"}, {"cache_salt": "s"}, {"model": "m:ad"}],
)
async def test_nothing_is_credited_across_adapters_and_salts(fields: dict[str, str]) -> None:
    tokens = list(range(80))
    async with running_engine() as engine, running_router(config(policy="lbgr")) as router:
        sidecar = await router.sidecar(engine)
        await sidecar.delta(extended=[(0, blocks_of(tokens))])
        await sidecar.acks(2)
        _, _, headers = await router.post("/v1/completions", {"model": "m", "prompt": tokens} | fields)
        assert chosen(decision_of(headers))["matched_tokens"] == 0
        namespace = {"lora_adapter": "ad"} if "lora_path" in fields or "model" in fields else {}
        salt = fields.get("cache_salt")
        namespace |= {"cache_salt": salt} if salt else {}
        await sidecar.delta(extended=[(0, blocks_of(tokens, **namespace))])
        await sidecar.acks(3)
        _, _, headers = await router.post("/v1/completions", {"model": "m", "prompt": tokens} | fields)
        assert chosen(decision_of(headers))["matched_tokens"] == 79


async def test_a_request_with_an_extra_key_is_credited_nothing_that_events_tell_of() -> None:
    tokens = list(range(80))
    async with running_engine() as engine, running_router(config(policy="lbgr")) as router:
        sidecar = await router.sidecar(engine)
        for namespace in ({}, {"cache_salt": "k"}):
            await sidecar.delta(extended=[(0, blocks_of(tokens, **namespace))])
        await sidecar.acks(3)
        _, _, headers = await router.post("/v1/completions", {"model": "m", "prompt": tokens, "extra_key": "k"})
        assert chosen(decision_of(headers))["matched_tokens"] == 0


@pytest.mark.parametrize(("page", "reusable"), [(1, 159), (16, 144), (48, 144), (64, 128)])
@pytest.mark.parametrize("policy", ["lbgr", "lbgr-paper", "cache_aware", "round_robin"])
async def test_only_whole_pages_of_the_engine_are_credited(policy: str, page: int, reusable: int) -> None:
    tokens = list(range(160))
    async with running_engine() as engine, running_router(config(policy=policy)) as router:
        sidecar = await router.sidecar(engine, page_size_tokens=page)
        await sidecar.delta(extended=[(0, blocks_of(tokens))])
        await sidecar.acks(2)
        _, _, headers = await router.post("/v1/completions", {"model": "m", "prompt": tokens})
        looks_at_caches = policy != "round_robin"
        assert chosen(decision_of(headers))["matched_tokens"] == (reusable if looks_at_caches else 0)
        assert (await router.workers())["workers"][0]["matched_tokens"] == reusable


async def test_random_deltas_leave_exactly_the_workers_view() -> None:
    rng = random.Random(7)
    async with running_engine() as engine, running_router() as router:
        sidecar = await router.sidecar(engine)
        chains: list[list[int]] = []
        messages = 1
        for step in range(200):
            if chains and rng.random() < 0.3:
                chain = rng.choice(chains)
                cut = rng.randrange(len(chain))
                await sidecar.delta(trimmed=chain[cut:][::-1])
                del chain[cut:]
                chains = [c for c in chains if c]
            elif chains and rng.random() < 0.3:
                chain = rng.choice(chains)
                more = [rng.getrandbits(64) for _ in range(rng.randrange(1, 9))]
                await sidecar.delta(extended=[(chain[-1], more)])
                chain += more
            elif rng.random() < 0.02:
                chains = []
                await sidecar.delta(clear=True)
            else:
                chain = [rng.getrandbits(64) for _ in range(rng.randrange(1, 9))]
                await sidecar.delta(extended=[(0, chain)])
                chains.append(chain)
            messages += 1
            if step % 20 == 0:
                await sidecar.heartbeat()
        await sidecar.acks(messages)
        await sidecar.heartbeat()
        index = router.router.pool.index
        assert index.count(A) == len(sidecar.blocks)
        assert index.digest(A) == sum(sidecar.blocks) % 2**64
        await router.until(lambda: router.router.metrics.digest_checks._value.get() >= 10)
        assert sidecar.count("snapshot_request") == 0
        assert await router.metric("drifts_total") == 0
        assert await router.metric("sync_blocks_total", kind="added") >= len(sidecar.blocks)
        assert await router.metric("sync_blocks_total", kind="trimmed") > 0


@pytest.mark.parametrize("doubt", ["gap", "unknown parent", "digest", "count", "late"])
async def test_each_doubt_brings_one_snapshot_and_then_the_right_view(doubt: str) -> None:
    async with running_engine() as engine, running_router() as router:
        sidecar = await router.sidecar(engine)
        await sidecar.delta(extended=[(0, [1, 2, 3])])
        if doubt == "gap":
            await sidecar.delta(extended=[(3, [4])], sequence=5)
            await sidecar.delta(extended=[(4, [5])], sequence=6)
        elif doubt == "unknown parent":
            await sidecar.delta(extended=[(99, [4])])
        elif doubt == "digest":
            await sidecar.heartbeat(digest=7)
        elif doubt == "count":
            await sidecar.heartbeat(blocks=7)
        else:  # deltas that a heartbeat speaks of never come
            await sidecar.heartbeat(next_sequence=3)
            await sidecar.heartbeat(next_sequence=3)
        request = await sidecar.reply("snapshot_request")
        assert request.reason
        assert (await router.worker())["state"] == "live"  # the old view keeps answering
        sidecar.next_sequence = 9
        await sidecar.snapshot([1, 2, 3, 4], [8], chunk=2)
        await sidecar.delta(extended=[(4, [5])])
        await sidecar.heartbeat()
        index = router.router.pool.index
        await router.until(lambda: index.digest(A) == 1 + 2 + 3 + 4 + 5 + 8)
        assert index.count(A) == 6
        assert sidecar.count("snapshot_request") == 1
        reason = {"late": "gap", "count": "digest"}.get(doubt, doubt)
        assert await router.metric("resyncs_total", reason=reason) == 1
        assert (await router.worker())["resyncs"] == 1


async def test_a_new_epoch_drops_the_old_tree_at_once_and_ends_the_old_stream() -> None:
    text = "x" * 160
    async with running_engine() as engine, running_router(config(policy="lbgr")) as router:
        old = await router.sidecar(engine)
        await old.delta(extended=[(0, text_blocks(text))])
        await old.acks(2)
        async with fake_sidecar(router.grpc_target, router.greeting(engine, epoch="e2"), token="join") as new:
            await new.connect()
            index = router.router.pool.index
            assert index.count(A) == 0
            worker = await router.worker()
            assert (worker["state"], worker["epoch"]) == ("syncing", "e2")
            await old.ended()  # it can only come again with another Hello
            await new.snapshot([1, 2])
            await router.state("pod-a/0", "live")
            assert (index.count(A), index.digest(A)) == (2, 3)
            async with fake_sidecar(router.grpc_target, router.greeting(engine), token="join") as late:
                with pytest.raises(grpc.aio.AioRpcError) as refusal:
                    await late.connect()
                assert refusal.value.code() is grpc.StatusCode.FAILED_PRECONDITION
                assert "e1" in str(refusal.value.details())


async def test_a_router_that_restarts_is_warm_when_the_sidecars_are_back() -> None:
    text = "common prefix " * 20
    async with running_engine() as engine:
        for _ in range(2):
            async with running_router(config(policy="lbgr")) as router:
                sidecar = await router.sidecar(engine)
                await sidecar.snapshot(text_blocks(text))
                await sidecar.acks(2)
                _, _, headers = await router.post("/v1/completions", {"model": "m", "prompt": text + "!"})
                assert chosen(decision_of(headers))["matched_tokens"] == len(text) // 16 * 16


async def test_a_large_snapshot_leaves_the_loop_to_others() -> None:
    """While it is applied, other work gets its turn after each slice."""
    chains = [list(range(1 + i * 50_000, 1 + (i + 1) * 50_000)) for i in range(6)]
    async with running_engine() as engine, running_router() as router:
        sidecar = await router.sidecar(engine)
        turns = 0

        async def count_turns() -> None:
            nonlocal turns
            while True:
                await asyncio.sleep(0)
                if router.router.pool.index._staged:
                    turns += 1

        counter = asyncio.create_task(count_turns())
        await sidecar.snapshot(*chains, chunk=50_000)
        # An acknowledgement says that a message was received; the last one may still be applied, slice by slice.
        await router.until(lambda: router.router.pool.index.count(A) == 300_000)
        counter.cancel()
        assert turns >= 300_000 // 8192 - 1


async def test_an_audit_finds_a_view_that_contradicts_itself() -> None:
    text = "y" * 320
    held = text_blocks(text)
    settings = config(options=options(routing={"audit_every": 1}), policy="lbgr")
    async with running_engine() as engine, running_router(settings) as router:
        sidecar = await router.sidecar(engine)
        # A chain with a hole: its digest is as announced, so only the walk can see it.
        await sidecar.snapshot(held[:4] + held[8:])
        await sidecar.acks(2)
        status, _, _ = await router.post("/v1/completions", {"model": "m", "prompt": text})
        assert status == 200
        request = await sidecar.reply("snapshot_request")
        assert request.reason.startswith("audit")
        assert await router.metric("resyncs_total", reason="audit") == 1
        assert await router.metric("drifts_total") == 1


async def test_a_view_is_complete_however_its_chunks_are_cut() -> None:
    async with running_engine() as engine, running_router() as router:
        sidecar = await router.sidecar(engine)
        for chunk in (1, 3, 64):
            await sidecar.snapshot(list(range(1, 65)), list(range(100, 130)), chunk=chunk)
            await sidecar.heartbeat()
        await router.until(lambda: router.router.pool.index.count(A) == 94)
        await sidecar.acks(1 + 94 + 32 + 2)
        assert sidecar.count("snapshot_request") == 0
