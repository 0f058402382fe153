"""A request whose worker failed was admitted: limits for new requests do not turn it away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kvrouting_core.routing.policy import AdmissionLimits
from kvrouting_router.router_process import RouterConfig
from tests.fakes.fake_http_engine import Answer, FakeHttpEngine, completion_body, json_answer, running_engine
from tests.router.router_under_test import RouterUnderTest, blocks_of, config, running_router

Posted = asyncio.Task[tuple[int, Any, dict[str, str]]]
# One request at a time on each worker, and none may wait.
LATE = {
    "policy": "lbgr",
    "policy_parameters": {"decode_limit": 1e-6},
    "limits": AdmissionLimits(max_waiting=0),
}


def prompt(number: int) -> dict[str, Any]:
    """One that shares nothing with those of other numbers."""
    return {"model": "m", "prompt": [number] * 40}


@asynccontextmanager
async def one_serves_and_one_fails(
    settings: RouterConfig,
) -> AsyncIterator[tuple[RouterUnderTest, FakeHttpEngine, asyncio.Event, asyncio.Event, Posted]]:
    """Two workers with a request each. The events end the first answer well, and the second by the worker's death."""
    serving, failing = asyncio.Event(), asyncio.Event()
    async with running_engine() as one, running_engine() as other, running_router(settings) as router:
        for number, engine in enumerate((one, other), start=1):
            engine.answer = lambda _: Answer(
                content_type="application/json", pieces=[completion_body()], before_headers=serving
            )
            sidecar = await router.sidecar(engine, pod_uid=f"pod-{number}")
            await sidecar.delta(extended=[(0, blocks_of([number] * 32))])  # so each has a prompt that it gets
            await sidecar.acks(2)
        first = asyncio.create_task(router.post("/v1/completions", prompt(1)))
        await router.until(lambda: bool(one.seen or other.seen))
        busy, doomed = (one, other) if one.seen else (other, one)
        doomed.answer = lambda _: Answer(before_headers=failing, die_after=-1)
        second = asyncio.create_task(router.post("/v1/completions", prompt(2)))
        await router.until(lambda: bool(doomed.seen))
        yield router, busy, serving, failing, second
        serving.set()
        assert (await first)[0] == 200
        await router.nothing_is_left()


async def test_it_waits_for_the_next_worker_though_nobody_new_may() -> None:
    async with one_serves_and_one_fails(config(**LATE)) as (router, busy, serving, failing, second):
        failing.set()
        await router.until(lambda: router.router.pool.dispatcher.waiting == 1 or second.done())
        assert not second.done()
        serving.set()
        assert (await second)[0] == 200
        assert len(busy.seen) == 2


@pytest.mark.parametrize("policy", ["least_load", "cache_aware", "round_robin"])
async def test_where_nobody_may_wait_the_client_hears_of_the_failure(policy: str) -> None:
    settings = config(policy=policy, limits=AdmissionLimits(max_in_flight_per_worker=1))
    async with one_serves_and_one_fails(settings) as (router, busy, _, failing, second):
        failing.set()
        status, body, _ = await second
        assert (status, body["error"]["type"]) == (502, "server_error")
        assert len(busy.seen) == 1
        assert (await router.post("/v1/completions", prompt(3)))[0] in (429, 502)


async def test_an_engines_own_error_is_handed_on_then_too() -> None:
    settings = config(policy="least_load", limits=AdmissionLimits(max_in_flight_per_worker=1))
    async with one_serves_and_one_fails(settings) as (_, busy, serving, failing, second):
        serving.set()
        busy.answer = lambda _: json_answer(b'{"error":{"message":"out of memory"}}', status=500)
        failing.set()
        status, body, _ = await second
        assert (status, body) == (500, {"error": {"message": "out of memory"}})
