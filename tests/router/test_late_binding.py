"""`lbgr` with late binding in a router on real sockets: what waits is seen, and whatever happens it is answered."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvrouting_core.routing.policy import AdmissionLimits
from kvrouting_router.router_process import RouterConfig
from kvrouting_router.tracing_otel import OtelTracer
from tests.fakes.fake_http_engine import Answer, FakeHttpEngine, chat_chunk, running_engine
from tests.router.router_under_test import PATIENCE_S, RouterUnderTest, chat, config, options, running_router

# One request at a time on each worker: short prompts would all be taken otherwise.
ONE_AT_A_TIME = {"binding": "late", "decode_limit": 1e-6}


def late(**changes: Any) -> RouterConfig:
    return config(policy="lbgr", policy_parameters=ONE_AT_A_TIME, **changes)


@asynccontextmanager
async def busy(
    settings: RouterConfig | None = None, **parts: Any
) -> AsyncIterator[tuple[RouterUnderTest, FakeHttpEngine, asyncio.Event]]:
    """One worker with one request that runs until the event is set, and a second request that waits."""
    gate = asyncio.Event()
    async with running_engine() as engine, running_router(settings or late(), **parts) as router:
        engine.answer = lambda _: Answer(pieces=[chat_chunk("a"), chat_chunk("b")], gates=[gate])
        await router.sidecar(engine)
        running = asyncio.create_task(ask(router))
        await router.until(lambda: len(engine.seen) == 1)
        yield router, engine, gate
        gate.set()
        await asyncio.gather(running, return_exceptions=True)


async def ask(router: RouterUnderTest) -> tuple[int, Any, dict[str, str]]:
    return await router.post("/v1/chat/completions", chat(stream=True))


async def one_waits(router: RouterUnderTest) -> asyncio.Task[tuple[int, Any, dict[str, str]]]:
    task = asyncio.create_task(ask(router))
    await router.until(lambda: router.router.pool.dispatcher.waiting == 1)
    return task


async def test_queue_and_wait_are_seen_in_metrics_and_as_a_span() -> None:
    exporter = InMemorySpanExporter()
    async with busy(tracer=OtelTracer(exporter)) as (router, _, gate):
        waiting = await one_waits(router)
        status, page = await router.get("/metrics")
        assert status == 200
        assert "kvrouting_router_waiting_requests 1.0" in page
        await asyncio.sleep(0.05)
        gate.set()
        assert (await waiting)[0] == 200
        await router.nothing_is_left()
        assert await router.metric("queue_wait_seconds_count") == 2
        assert await router.metric("queue_wait_seconds_sum") >= 0.05
    spans = exporter.get_finished_spans()
    (wait,) = [span for span in spans if span.name == "wait"]
    decides = {span.context.span_id: span for span in spans if span.name == "decide" and span.context}
    assert wait.parent is not None
    decide = decides[wait.parent.span_id]
    assert len(decides) == 2
    assert decide.attributes is not None
    assert wait.start_time is not None
    assert wait.end_time is not None
    waited_ms = (wait.end_time - wait.start_time) / 1e6
    assert waited_ms >= 50
    assert decide.attributes["kvrouting.waited_ms"] == pytest.approx(waited_ms)


async def test_a_client_that_leaves_while_it_waits_takes_nothing() -> None:
    async with busy() as (router, engine, gate):
        waiting = await one_waits(router)
        waiting.cancel()
        await router.until(lambda: router.router.pool.dispatcher.waiting == 0)
        gate.set()
        await router.nothing_is_left()
        assert len(engine.seen) == 1


async def test_a_request_planned_for_a_worker_that_restarts_goes_to_another() -> None:
    async with busy() as (router, engine, _gate), running_engine() as other:
        waiting = await one_waits(router)
        await router.sidecar(engine, epoch="e2")
        assert not waiting.done()  # the worker's place is taken until the request of its former process ends
        await router.sidecar(other, pod_uid="pod-b", gpu_class="H200")  # quicker, so that there is no tie between them
        assert (await waiting)[0] == 200
        assert (len(other.seen), len(engine.seen)) == (1, 1)


async def test_when_the_last_worker_is_gone_those_who_wait_are_told() -> None:
    settings = late(options=options(sync={"heartbeat_interval_s": 0.05, "silence_s": 1.5, "gone_s": 2.0}))
    async with busy(settings) as (router, _, _gate):
        waiting = await one_waits(router)
        await router.sidecars[0].close()
        status, body, _ = await waiting
        assert (status, "no worker" in body["error"]["message"]) == (503, True)


async def test_a_router_that_stops_tells_those_who_wait_and_its_successor_serves_them() -> None:
    async with busy() as (router, engine, gate):
        waiting = await one_waits(router)
        stopping = asyncio.create_task(router.router.stop())
        status, body, _ = await waiting
        assert (status, "shutting down" in body["error"]["message"]) == (503, True)
        gate.set()
        async with asyncio.timeout(PATIENCE_S):
            await stopping
        router.router.stop = _done  # type: ignore[method-assign]  # it has stopped
        async with running_router(late()) as successor:
            await successor.sidecar(engine)
            assert (await ask(successor))[0] == 200


async def _done() -> None:
    return None


async def test_beyond_the_limit_of_the_queue_clients_are_told_when_to_come_again() -> None:
    async with busy(late(limits=AdmissionLimits(max_waiting=1))) as (router, _, gate):
        waiting = await one_waits(router)
        status, body, headers = await router.post("/v1/chat/completions", chat())
        assert (status, body["error"]["type"]) == (429, "rate_limit_error")
        assert int(headers["retry-after"]) >= 1
        gate.set()
        assert (await waiting)[0] == 200
        await router.nothing_is_left()


async def test_time_alone_makes_room_where_no_answer_is_streamed() -> None:
    """One engine that reports nothing and sends no first token: its first prompt takes a third of a second."""
    gate = asyncio.Event()
    settings = config(policy="lbgr", policy_parameters={"decode_limit": 0})
    async with running_engine() as engine, running_router(settings) as router:
        engine.answer = lambda _: Answer(content_type="application/json", pieces=[b"{}"], before_headers=gate)
        await router.sidecar(engine)
        body = {"model": "m", "prompt": list(range(3000))}
        first = asyncio.create_task(router.post("/v1/completions", body))
        await router.until(lambda: len(engine.seen) == 1)
        second = asyncio.create_task(router.post("/v1/completions", body | {"prompt": list(range(5000, 8000))}))
        await router.until(lambda: router.router.pool.dispatcher.waiting == 1)
        await router.until(lambda: len(engine.seen) == 2)
        assert not first.done()
        gate.set()
        await asyncio.gather(first, second)
