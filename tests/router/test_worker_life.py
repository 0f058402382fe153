"""A worker's life at the router on real sockets: handshake, silence, failures, draining, the end."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest

from kvrouting.v1 import sync_pb2
from kvrouting_core.identity import WorkerId
from kvrouting_core.routing.events import LoadReport
from kvrouting_router.grpc_sync import PoolTerms, read_heartbeat, read_hello
from kvrouting_router.sync_session import SyncSession
from tests.fakes.fake_http_engine import Answer, chat_chunk, running_engine
from tests.fakes.fake_sidecar import fake_sidecar, hello
from tests.router.recording_policy import Recording
from tests.router.router_under_test import (
    HASHER,
    PATIENCE_S,
    chat,
    config,
    options,
    running_router,
)

A = WorkerId("pod-a/0")


@pytest.mark.parametrize("token", [None, "", "secret-of-another-pool"])
async def test_a_worker_without_the_join_token_is_refused(token: str | None, caplog: pytest.LogCaptureFixture) -> None:
    async with running_router() as router:
        for _ in range(3):  # as a sidecar does
            greeting = hello(hash_key_id=HASHER.key_id)
            async with fake_sidecar(router.grpc_target, greeting, token=token) as sidecar:
                with pytest.raises(grpc.aio.AioRpcError) as refusal:
                    await sidecar.connect()
            assert refusal.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert (await router.workers())["workers"] == []
        assert await router.metric("handshakes_refused_total", reason="token") == 3
    (line,) = [record for record in caplog.records if record.message == "worker refused"]
    fields = line.__dict__["fields"]
    assert fields["reason"] == ("a wrong join token" if token is not None else "no join token")
    assert fields["peer"].startswith("ipv4:127.0.0.1:")
    assert not any("secret-of-another" in str(record.__dict__) for record in caplog.records)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("pool", "other"),
        ("model", "other"),
        ("block_size_tokens", 32),
        ("hash_key_id", "00ff"),
        ("epoch", ""),
        ("capacity_tokens", 0),
        ("http_endpoint", "localhost:1"),
        ("mirror_source", sync_pb2.MIRROR_SOURCE_UNSPECIFIED),
        ("dp_rank", 2),
    ],
)
async def test_a_worker_that_does_not_fit_is_told_why(field: str, value: Any) -> None:
    greeting = hello(**{"hash_key_id": HASHER.key_id} | {field: value})
    async with running_router() as router, fake_sidecar(router.grpc_target, greeting, token="join") as sidecar:
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await sidecar.connect()
        assert refusal.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        details = refusal.value.details()
        assert details is not None
        assert field in details
        if field in ("pool", "model", "block_size_tokens", "hash_key_id"):  # both values are named
            ours = {"pool": "'p'", "model": "'m'", "block_size_tokens": "16", "hash_key_id": HASHER.key_id}[field]
            assert str(value) in details
            assert ours in details


async def test_another_tokenizer_is_flagged_and_served() -> None:
    async with running_engine() as engine, running_router() as router:
        await router.sidecar(engine, tokenizer_fingerprint="other")
        worker = await router.worker()
        assert worker["state"] == "live"
        assert "other" in worker["tokenizer_mismatch"]
        assert "bytes-1" in worker["tokenizer_mismatch"]
        assert await router.metric("tokenizer_mismatch", worker="pod-a/0") == 1
        status, _, _ = await router.post("/v1/chat/completions", chat())
        assert status == 200


async def test_a_worker_is_chosen_only_after_its_snapshot() -> None:
    async with running_engine() as engine, running_router() as router:
        greeting = router.greeting(engine)
        async with fake_sidecar(router.grpc_target, greeting, token="join") as sidecar:
            welcome = await sidecar.connect()
            assert welcome.window_messages == 64
            assert welcome.heartbeat_interval_s == pytest.approx(0.1)
            assert (await router.worker())["state"] == "syncing"
            status, body, _ = await router.post("/v1/chat/completions", chat())
            assert status == 503
            assert body["error"]["type"] == "service_unavailable_error"
            await sidecar.snapshot([1, 2, 3])
            await router.state("pod-a/0", "live")
            status, _, _ = await router.post("/v1/chat/completions", chat())
            assert status == 200


async def test_a_new_pod_at_the_same_address_replaces_the_old_one() -> None:
    async with running_engine() as engine, running_router() as router:
        await router.sidecar(engine)
        await router.sidecar(engine, pod_uid="pod-b")
        assert [w["worker"] for w in (await router.workers())["workers"]] == ["pod-b/0"]
        assert router.router.pool.index.workers() == {WorkerId("pod-b/0")}


async def test_a_silent_sidecar_makes_its_worker_suspect_while_its_streams_go_on() -> None:
    gate = asyncio.Event()
    settings = config(options=options(sync={"heartbeat_interval_s": 0.05, "silence_s": 2.0, "gone_s": 60.0}))
    async with running_engine() as engine, running_router(settings) as router:
        engine.answer = lambda _: Answer(pieces=[chat_chunk("a"), chat_chunk("b")], gates=[gate, gate])
        sidecar = await router.sidecar(engine)
        await sidecar.delta(extended=[(0, [1, 2, 3])])
        running = asyncio.create_task(router.post("/v1/chat/completions", chat(stream=True)))
        async with asyncio.timeout(PATIENCE_S):
            await engine.arrived.wait()
        await sidecar.close()
        router.sidecars.clear()
        await router.state("pod-a/0", "suspect")
        assert "silent" in (await router.worker())["reason"]
        status, _, _ = await router.post("/v1/chat/completions", chat())
        assert status == 503
        status, text = await router.get("/readyz")
        assert (status, "silent" in text) == (503, True)
        gate.set()
        status, body, _ = await running
        assert (status, body) == (200, chat_chunk("a") + chat_chunk("b"))
        # On its return the same process is synced anew, and is live again.
        back = await router.sidecar(engine)
        await back.heartbeat()
        assert (await router.worker())["blocks"] == 0
        await router.nothing_is_left()


async def test_a_worker_silent_for_long_is_gone_and_may_come_back() -> None:
    settings = config(options=options(sync={"heartbeat_interval_s": 0.05, "silence_s": 1.5, "gone_s": 2.0}))
    async with running_engine() as engine, running_router(settings) as router:
        sidecar = await router.sidecar(engine)
        await sidecar.delta(extended=[(0, [1, 2, 3])])
        await router.until(lambda: not len(router.router.pool.registry))
        assert router.router.pool.index.workers() == frozenset()
        # Its stream ends, so that a sidecar that lives says Hello again; a new one of the same process is welcome.
        await sidecar.ended()
        await router.sidecar(engine)
        assert router.router.pool.index.count(A) == 0


async def test_a_stream_of_requests_goes_on_when_its_worker_is_gone() -> None:
    gate = asyncio.Event()
    settings = config(options=options(sync={"heartbeat_interval_s": 0.05, "silence_s": 1.5, "gone_s": 2.0}))
    async with running_engine() as engine, running_router(settings) as router:
        engine.answer = lambda _: Answer(pieces=[chat_chunk("a")], gates=[gate])
        await router.sidecar(engine)
        running = asyncio.create_task(router.post("/v1/chat/completions", chat(stream=True)))
        await router.until(lambda: not len(router.router.pool.registry))
        gate.set()
        status, body, _ = await running
        assert (status, body) == (200, chat_chunk("a"))
        await router.nothing_is_left()


async def test_what_a_gone_process_still_says_changes_nothing() -> None:
    """Messages that were under way when the new process said Hello."""
    async with running_engine() as engine, running_router() as router:
        pool = router.router.pool
        terms = PoolTerms(
            pool="p",
            model="m",
            block_size_tokens=16,
            hash_key_id=HASHER.key_id,
            tokenizer_fingerprint="",
            gpu_classes=["L40"],
            join_token=None,
        )
        sessions = []
        for epoch in ("e1", "e2"):
            facts = read_hello(router.greeting(engine, epoch=epoch), terms)
            handshake = pool.hello(facts)
            assert handshake.stream is not None
            sessions.append(
                SyncSession(
                    pool=pool,
                    worker=A,
                    epoch=epoch,
                    stream=handshake.stream,
                    send=lambda _: None,
                    metrics=router.router.metrics,
                    slice_blocks=100,
                    now_s=asyncio.get_running_loop().time,
                )
            )
            await sessions[-1].snapshot(
                epoch=epoch, first=True, last=True, next_sequence=0, runs=[sync_pb2.BlockRun(blocks=[1, 2])]
            )
        old, _ = sessions
        await old.snapshot(epoch="e1", first=True, last=True, next_sequence=0, runs=[sync_pb2.BlockRun(blocks=[7])])
        await old.delta(epoch="e1", sequence=0, clear=True, trimmed=[], extended=[])
        old.draining(epoch="e0", reason="late")
        vitals = read_heartbeat(sync_pb2.Heartbeat(engine_healthy=False), read_hello(router.greeting(engine), terms))
        old.heartbeat(epoch="e1", next_sequence=0, digest=0, vitals=vitals)
        assert (pool.index.count(A), pool.index.digest(A)) == (2, 3)
        assert (await router.worker())["state"] == "live"
        assert await router.metric("fenced_messages_total") == 4


async def test_an_unhealthy_engine_is_not_chosen() -> None:
    async with running_engine() as engine, running_router() as router:
        sidecar = await router.sidecar(engine)
        await sidecar.heartbeat(engine_healthy=False, reason="the engine does not answer")
        await router.state("pod-a/0", "suspect")
        assert (await router.worker())["reason"] == "the engine does not answer"
        await sidecar.heartbeat()
        await router.state("pod-a/0", "live")


async def test_a_worker_whose_required_eviction_policy_is_unproven_gets_no_request() -> None:
    lru = sync_pb2.EvictionPolicy(name="lru", proven_live=True)
    async with running_engine() as engine, running_router() as router:
        sidecar = await router.sidecar(engine, required_eviction_policy="rlt")
        await sidecar.heartbeat(eviction_policy=lru)
        await router.state("pod-a/0", "suspect")
        assert "does not prove the eviction policy rlt at work: it proves lru" in (await router.worker())["reason"]
        assert (await router.worker())["eviction_policy"] == {"name": "lru", "live": True}
        status, _, _ = await router.post("/v1/chat/completions", chat())
        assert (status, len(engine.seen)) == (503, 0)
        await sidecar.heartbeat()
        await router.state("pod-a/0", "live")
        status, _, _ = await router.post("/v1/chat/completions", chat())
        assert (status, len(engine.seen)) == (200, 1)


async def test_failed_attempts_open_the_breaker_and_a_probe_closes_it() -> None:
    async with running_engine() as engine, running_router() as router:
        await router.sidecar(engine)
        healthy = engine.answer
        engine.answer = lambda _: Answer(die_after=-1)
        engine.healthy = False
        for _ in range(3):
            status, _, _ = await router.post("/v1/chat/completions", chat())
            assert status == 502
        worker = await router.worker()
        assert worker["state"] == "suspect"
        assert "3 attempts in a row failed" in worker["reason"]
        status, _, _ = await router.post("/v1/chat/completions", chat())
        assert status == 503
        await router.until(lambda: engine.failed_probes > 1)
        assert (await router.worker())["state"] == "suspect"
        engine.healthy, engine.answer = True, healthy
        await router.state("pod-a/0", "live")
        status, _, _ = await router.post("/v1/chat/completions", chat())
        assert status == 200
        await router.nothing_is_left()


async def test_a_draining_worker_gets_nothing_new_and_hears_its_count_down_to_zero() -> None:
    gates = [asyncio.Event(), asyncio.Event()]
    waiting = list(gates)
    async with running_engine() as engine, running_router() as router:
        engine.answer = lambda _: Answer(pieces=[chat_chunk("a")], gates=[waiting.pop()])
        sidecar = await router.sidecar(engine)
        running = [asyncio.create_task(router.post("/v1/chat/completions", chat(stream=True))) for _ in gates]
        await router.until(lambda: len(engine.seen) == 2)
        await sidecar.draining("rollout")
        assert (await sidecar.reply("in_flight", 1)).requests == 2
        await router.state("pod-a/0", "draining")
        assert (await router.worker())["reason"] == "draining: rollout"
        status, _, _ = await router.post("/v1/chat/completions", chat())
        assert status == 503
        for gate, expected in zip(gates, (1, 0), strict=True):
            gate.set()
            assert (await sidecar.reply("in_flight", 3 - expected)).requests == expected
        assert [status for status, _, _ in await asyncio.gather(*running)] == [200, 200]
        await sidecar.close()
        await router.until(lambda: not len(router.router.pool.registry))


async def test_an_idle_draining_worker_hears_zero_at_once() -> None:
    async with running_engine() as engine, running_router() as router:
        sidecar = await router.sidecar(engine)
        await sidecar.draining()
        assert (await sidecar.reply("in_flight")).requests == 0


async def test_the_load_report_reaches_the_policy_and_the_page() -> None:
    load = sync_pb2.Load(
        running_requests=3,
        waiting_requests=2,
        used_tokens=100,
        max_total_tokens=16_000,
        waiting_uncached_tokens=50,
        age_s=0.5,
    )
    policy = Recording(at_once=100)
    async with running_engine() as engine, running_router(policy=lambda _: policy) as router:
        sidecar = await router.sidecar(engine)
        sent_ms = asyncio.get_running_loop().time() * 1000
        await sidecar.heartbeat(load=load)
        await router.until(lambda: any(w.vitals and w.vitals.load for w in router.router.pool.registry))
        worker = await router.worker()
        assert worker["load"]["running_requests"] == 3
        reports = [e for e in policy.events if isinstance(e, LoadReport)]
        assert [(r.worker, r.running_requests, r.waiting_uncached_tokens) for r in reports] == [(A, 3, 50)]
        assert sent_ms <= reports[0].reported_ms + 500 <= asyncio.get_running_loop().time() * 1000
        assert worker["eviction_policy"] == {"name": "rlt", "live": True}


async def test_a_mirror_that_lowers_its_word_is_shown_so() -> None:
    async with running_engine() as engine, running_router() as router:
        sidecar = await router.sidecar(engine)
        assert (await router.worker())["mirror"] == "exact"
        await sidecar.heartbeat(
            mirror_source=sync_pb2.MIRROR_SOURCE_PARTIAL, events_flowing=False, reason="gap in the events"
        )
        await router.until(lambda: [w.mirror.value for w in router.router.pool.registry] == ["partial"])
        worker = await router.worker()
        assert (worker["events_flowing"], worker["reason"], worker["state"]) == (False, "gap in the events", "live")


async def test_a_stream_that_does_not_begin_with_hello_is_refused() -> None:
    async with running_router() as router, fake_sidecar(router.grpc_target, hello(), token="join") as sidecar:
        await sidecar.send(draining=sync_pb2.Draining(epoch="e1"))
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await sidecar.connect()
        assert refusal.value.code() is grpc.StatusCode.FAILED_PRECONDITION
