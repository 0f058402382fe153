"""What the sidecar tells its kubelet and its metrics collector."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import grpc
import pytest

from kvrouting_sidecar.engine_http import EngineTimes
from kvrouting_sidecar.process import pages_of
from tests.fakes.fake_engine import FakeEngine
from tests.fakes.fake_router import FakeRouter
from tests.fakes.running_sidecar import eventually, in_step, running_sidecar

_Get = Callable[[str], Awaitable[tuple[int, str]]]


@asynccontextmanager
async def _pages(engine: FakeEngine, *routers: FakeRouter, **changes: Any) -> AsyncIterator[_Get]:
    async with (
        running_sidecar(engine, *routers, **changes) as sidecar,
        pages_of(sidecar, host="127.0.0.1", port=0) as port,
        aiohttp.ClientSession(f"http://127.0.0.1:{port}") as client,
    ):

        async def get(path: str) -> tuple[int, str]:
            async with client.get(path) as answer:
                return answer.status, await answer.text()

        yield get


async def _comes(get: _Get, path: str, wanted: Callable[[int, str], bool]) -> str:
    """Ask until the answer is as wanted."""
    deadline = time.monotonic() + 45.0
    while True:
        status, text = await get(path)
        if wanted(status, text):
            return text
        assert time.monotonic() < deadline, f"{path} stays at {status}: {text}"
        await asyncio.sleep(0.01)


async def test_ready_says_what_is_missing_and_health_does_not_wait_for_it() -> None:
    engine = FakeEngine()
    await engine.start()
    await engine.stop()
    async with _pages(engine) as get:
        assert (await get("/healthz"))[0] == 200
        status, text = await get("/readyz")
        assert status == 503
        assert "has not described itself yet" in text
        await _comes(get, "/readyz", lambda _, text: "Cannot connect to host" in text)
        await engine.start()
        await _comes(get, "/readyz", lambda status, _: status == 200)
        engine.healthy = False
        text = await _comes(get, "/readyz", lambda status, _: status == 503)
        assert "/health does not answer 200" in text
    await engine.stop()


async def test_ready_needs_the_eviction_policy_only_where_it_is_required() -> None:
    async with FakeEngine() as engine, FakeRouter() as router:
        engine.eviction_live = False
        async with _pages(engine, router) as get:
            await _comes(get, "/readyz", lambda status, _: status == 200)
        async with _pages(engine, router, require_eviction="rlt") as get:
            text = await _comes(get, "/readyz", lambda _, text: "rlt as not live" in text)
            assert '"ready": false' in text
            engine.eviction_live = True
            await _comes(get, "/readyz", lambda status, _: status == 200)
        async with _pages(engine, router, require_eviction="lru") as get:
            text = await _comes(get, "/readyz", lambda _, text: "runs 'rlt', not 'lru'" in text)
            assert 'eviction_policy_live{rank="0"} 0.0' in (await get("/metrics"))[1]


async def test_ready_is_gone_while_the_engine_is_away() -> None:
    async with FakeEngine() as engine, FakeRouter() as router, _pages(engine, router) as get:
        await _comes(get, "/readyz", lambda status, _: status == 200)
        await eventually(lambda: router.blocks() is not None)
        await engine.stop()
        await _comes(get, "/readyz", lambda status, text: status == 503 and "not connected to the engine" in text)
        worker = router.worker()
        assert worker is not None
        await eventually(lambda: not worker.heartbeats[-1].events_flowing)
        assert not worker.heartbeats[-1].engine_healthy
        await engine.start()
        await _comes(get, "/readyz", lambda status, _: status == 200)


async def test_an_unproven_eviction_policy_is_said_for_an_engine_without_state_socket() -> None:
    async with FakeEngine(state_socket=False) as engine, _pages(engine, require_eviction="rlt") as get:
        await _comes(get, "/readyz", lambda _, text: "that rlt is at work is not proven" in text)


async def test_an_engine_without_events_is_the_reason_and_not_its_state_socket() -> None:
    async with FakeEngine(events=False) as engine, FakeRouter() as router:
        async with _pages(engine, router, require_eviction="rlt") as get:
            text = await _comes(get, "/readyz", lambda _, text: '"engine_known": {"holds": true' in text)
        check = json.loads(text)["checks"]["eviction_policy_live"]
        assert "the engine publishes no KV events" in check["reason"]
        assert "state socket" not in check["reason"]


_NO = grpc.StatusCode.FAILED_PRECONDITION


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (grpc.StatusCode.UNAUTHENTICATED, "wrong join token"),
        (_NO, "this router serves pool 'b', not 'a'"),
        (_NO, "hash key 1 is not the pool's 2"),
        (grpc.StatusCode.ABORTED, "superseded by another stream"),
    ],
)
async def test_a_worker_that_every_router_refuses_is_not_ready_and_says_why(code: grpc.StatusCode, reason: str) -> None:
    async with FakeEngine() as engine, FakeRouter() as one, FakeRouter() as other:
        one.refuses_with = other.refuses_with = (code, reason)
        async with _pages(engine, one, other) as get:
            text = await _comes(get, "/readyz", lambda status, text: status == 503 and text.count(reason) >= 2)
            check = json.loads(text)["checks"]["not_refused"]
            assert check["required"]
            assert check["reason"].count(f"{code.name}: {reason}") == 2
            one.refuses_with = None
            await _comes(get, "/readyz", lambda status, _: status == 200)


async def test_routers_that_are_not_there_refuse_nobody() -> None:
    async with FakeEngine() as engine, FakeRouter() as away, FakeRouter() as refusing:
        await away.stop()
        refusing.refuses_with = (_NO, "another pool")
        async with _pages(engine, away, refusing) as get:
            await eventually(lambda: refusing.refused)
            await _comes(get, "/readyz", lambda status, text: status == 200 and "UNAVAILABLE" in text)


async def test_the_return_of_an_engine_is_noticed_long_before_the_next_look_at_a_healthy_one() -> None:
    engine = FakeEngine()
    await engine.start()
    await engine.stop()
    times = EngineTimes(healthy_s=100_000.0, away_s=0.02)
    async with FakeRouter() as router, _pages(engine, router, engine_times=times) as get:
        await _comes(get, "/readyz", lambda _, text: "has not described itself yet" in text)
        engine.healthy = False
        await engine.start()
        await _comes(get, "/readyz", lambda _, text: '"engine_known": {"holds": true' in text)
        engine.healthy = True
        await _comes(get, "/readyz", lambda status, _: status == 200)
    await engine.stop()


async def test_metrics_tell_of_mirror_routers_and_queue() -> None:
    async with FakeEngine() as engine, FakeRouter() as router, _pages(engine, router) as get:
        await eventually(lambda: router.blocks() is not None)
        engine.ranks[0].lose(1)
        engine.ranks[0].store(list(range(100)))
        engine.ranks[0].store(list(range(200)))
        await in_step(engine, router)
        # What came by replay may still wait in the queue as well.
        text = await _comes(
            get,
            "/metrics",
            lambda _, text: (
                'comparisons_total{rank="0",result="ok"} 0' not in text and 'queue_bytes{rank="0"} 0.0' in text
            ),
        )
        values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        prefix = "kvrouting_sidecar"
        assert values[f'{prefix}_mirror_blocks{{rank="0"}}'] == "12.0"
        assert values[f'{prefix}_mirror_pages{{rank="0"}}'] == "200.0"
        assert float(values[f'{prefix}_event_batches_total{{rank="0"}}']) == 2
        assert float(values[f'{prefix}_gaps_total{{rank="0"}}']) >= 1
        assert values[f'{prefix}_digest_comparisons_total{{rank="0",result="failed"}}'] == "0.0"
        assert values[f'{prefix}_mirror_source{{rank="0",source="exact"}}'] == "1.0"
        address = f'router="127.0.0.1:{router.port}"'
        assert values[f'{prefix}_router_connected{{rank="0",{address}}}'] == "1.0"
        for name in ("router_unacknowledged_messages", "router_pending_blocks", "router_lag_seconds"):
            assert f'{prefix}_{name}{{rank="0",{address}}}' in values
        assert values[f'{prefix}_event_queue_bytes{{rank="0"}}'] == "0.0"


async def test_metrics_show_the_guarantee_of_a_policy_that_reports_it() -> None:
    async with FakeEngine() as engine, FakeRouter() as router, _pages(engine, router) as get:
        text = await _comes(get, "/metrics", lambda _, text: 'eviction_policy_live{rank="0"} 1.0' in text)
        assert "phi_tokens" not in text
        assert "eviction_evicted_tokens" not in text
        engine.eviction_figures = {
            "policy": "rlt-adaptive",
            "evicted_tokens": 640,
            "phi_tokens": -128,
            "phi_limit_tokens": 256,
            "phi_bound_tokens": 1500,
            "safe_mode": True,
            "safe_entries": 3,
            "own_loaded_tokens": 6400,
            "ghost_loaded_tokens": 7040,
        }
        text = await _comes(get, "/metrics", lambda _, text: "phi_tokens" in text)
        for line in (
            'eviction_evicted_tokens_total{rank="0"} 640.0',
            'eviction_own_loaded_tokens_total{rank="0"} 6400.0',
            'eviction_ghost_loaded_tokens_total{rank="0"} 7040.0',
            'eviction_safe_entries_total{rank="0"} 3.0',
            'eviction_safe_mode{rank="0"} 1.0',
            'eviction_phi_tokens{rank="0"} -128.0',
            'eviction_phi_limit_tokens{rank="0"} 256.0',
            'eviction_phi_bound_tokens{rank="0"} 1500.0',
        ):
            assert f"kvrouting_sidecar_{line}" in text
