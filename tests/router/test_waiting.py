"""Requests that a policy keeps, and reservations on every outcome, with a policy that takes one at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from kvrouting_core.identity import WorkerId
from kvrouting_core.routing.events import (
    Arrival,
    FirstToken,
    Outcome,
    PrefixArrived,
    RoutingRequest,
    WorkerGone,
    WorkerJoined,
    WorkerProfile,
)
from kvrouting_router.dispatcher import Dispatcher
from kvrouting_router.errors import NoWorkerReadyError, OverloadedError, StoppingError
from tests.fakes.fake_http_engine import Answer, FakeHttpEngine, chat_chunk, running_engine
from tests.router.recording_policy import Recording
from tests.router.router_under_test import PATIENCE_S, RouterUnderTest, blocks_of, chat, config, options, running_router


@asynccontextmanager
async def busy_pool() -> AsyncIterator[tuple[RouterUnderTest, FakeHttpEngine, Recording, asyncio.Event]]:
    """One worker that is busy with one request until the event is set."""
    policy = Recording()
    gate = asyncio.Event()
    async with running_engine() as engine, running_router(policy=lambda _: policy) as router:
        engine.answer = lambda _: Answer(pieces=[chat_chunk("a"), chat_chunk("b")], gates=[gate])
        await router.sidecar(engine)
        running = asyncio.create_task(router.post("/v1/chat/completions", chat(stream=True)))
        await router.until(lambda: len(engine.seen) == 1)
        yield router, engine, policy, gate
        gate.set()
        await asyncio.gather(running, return_exceptions=True)


async def test_a_kept_request_is_dispatched_when_there_is_room() -> None:
    async with busy_pool() as (router, engine, policy, gate):
        waiting = asyncio.create_task(router.post("/v1/chat/completions", chat(stream=True)))
        await router.until(lambda: policy.waiting == 1)
        assert (await router.workers())["waiting"] == 1
        assert len(engine.seen) == 1
        gate.set()
        status, _, _ = await waiting
        assert status == 200
        await router.nothing_is_left()
        assert policy.outcomes() == [Outcome.COMPLETED] * 2
        assert policy.each_arrival_ended_once()


async def test_a_client_that_leaves_while_it_waits_leaves_the_queue() -> None:
    async with busy_pool() as (router, engine, policy, gate):
        waiting = asyncio.create_task(router.post("/v1/chat/completions", chat()))
        await router.until(lambda: policy.waiting == 1)
        waiting.cancel()
        await router.until(lambda: policy.waiting == 0)
        gate.set()
        await router.nothing_is_left()
        assert len(engine.seen) == 1
        assert policy.outcomes() == [Outcome.CANCELLED, Outcome.COMPLETED]
        assert policy.each_arrival_ended_once()


async def test_a_request_whose_worker_goes_while_it_waits_gets_the_next_one() -> None:
    async with busy_pool() as (router, engine, policy, _gate), running_engine() as other:
        waiting = asyncio.create_task(router.post("/v1/chat/completions", chat()))
        await router.until(lambda: policy.waiting == 1)
        await router.sidecar(engine, epoch="e2")  # its engine process is a new one
        await router.sidecar(other, pod_uid="pod-b")
        status, _, _ = await waiting
        assert status == 200
        assert policy.waiting == 0


async def test_a_request_waits_no_longer_than_its_total_limit() -> None:
    policy = Recording()
    settings = config(options=options(times={"total_s": 0.4}))
    async with running_engine() as engine, running_router(settings, policy=lambda _: policy) as router:
        engine.answer = lambda _: Answer(before_headers=asyncio.Event())
        await router.sidecar(engine)
        answers = await asyncio.gather(*(router.post("/v1/chat/completions", chat()) for _ in range(2)))
        assert [status for status, _, _ in answers] == [504, 504]
        await router.nothing_is_left()
        assert policy.each_arrival_ended_once()


async def test_beyond_the_limit_of_the_queue_clients_are_told_when_to_come_again() -> None:
    policy = Recording(max_waiting=1)
    gate = asyncio.Event()
    async with running_engine() as engine, running_router(policy=lambda _: policy) as router:
        engine.answer = lambda _: Answer(pieces=[chat_chunk("a")], gates=[gate])
        await router.sidecar(engine)
        taken = [asyncio.create_task(router.post("/v1/chat/completions", chat(stream=True))) for _ in range(2)]
        await router.until(lambda: policy.waiting == 1)
        status, body, headers = await router.post("/v1/chat/completions", chat())
        assert (status, body["error"]["type"]) == (429, "rate_limit_error")
        assert int(headers["retry-after"]) >= 1
        assert await router.metric("refusals_total", reason="overloaded") == 1
        status, body, _ = await router.post("/generate", {"text": "x"})
        assert (status, set(body["error"])) == (429, {"message"})
        gate.set()
        assert [s for s, _, _ in await asyncio.gather(*taken)] == [200, 200]
        await router.nothing_is_left()


async def test_at_shutdown_running_requests_end_and_waiting_ones_are_refused() -> None:
    async with busy_pool() as (router, engine, policy, gate):
        waiting = asyncio.create_task(router.post("/v1/chat/completions", chat()))
        await router.until(lambda: policy.waiting == 1)
        stopping = asyncio.create_task(router.router.stop())
        status, body, _ = await waiting
        assert (status, "shutting down" in body["error"]["message"]) == (503, True)
        assert not stopping.done()
        gate.set()
        async with asyncio.timeout(PATIENCE_S):
            await stopping
        assert policy.each_arrival_ended_once()
        assert policy.outcomes() == [Outcome.CANCELLED, Outcome.COMPLETED]
        assert len(engine.seen) == 1
        router.router.stop = _done  # type: ignore[method-assign]  # it has stopped


async def _done() -> None:
    return None


async def test_a_first_token_and_the_prefixs_arrival_are_told_in_order() -> None:
    policy = Recording(at_once=9)
    tokens = list(range(64))
    settings = config(options=options(routing={"prefix_credit_s": 0.1}))
    async with running_engine() as engine, running_router(settings, policy=lambda _: policy) as router:
        engine.answer = lambda _: Answer(pieces=[chat_chunk("a")], hang=True)
        await router.sidecar(engine)
        task = asyncio.create_task(router.post("/v1/completions", {"model": "m", "prompt": tokens, "stream": True}))
        await router.until(lambda: any(isinstance(e, PrefixArrived) for e in policy.events))
        kinds = [type(e) for e in policy.events if not isinstance(e, WorkerJoined)]
        assert kinds == [Arrival, FirstToken, PrefixArrived]
        task.cancel()
        await router.nothing_is_left()


async def test_the_prefix_has_arrived_as_soon_as_a_delta_shows_it() -> None:
    policy = Recording(at_once=9)
    tokens = list(range(64))
    settings = config(options=options(routing={"prefix_credit_s": 60.0}))
    async with running_engine() as engine, running_router(settings, policy=lambda _: policy) as router:
        engine.answer = lambda _: Answer(pieces=[chat_chunk("a")], hang=True)
        sidecar = await router.sidecar(engine)
        task = asyncio.create_task(router.post("/v1/completions", {"model": "m", "prompt": tokens, "stream": True}))
        await router.until(lambda: any(isinstance(e, FirstToken) for e in policy.events))
        await sidecar.delta(extended=[(0, blocks_of(tokens)[:2])])
        await sidecar.acks(2)
        assert not any(isinstance(e, PrefixArrived) for e in policy.events)
        await sidecar.delta(extended=[(blocks_of(tokens)[1], blocks_of(tokens)[2:])])
        await router.until(lambda: any(isinstance(e, PrefixArrived) for e in policy.events))
        task.cancel()
        await router.nothing_is_left()


# --- the dispatcher alone ---


def request(name: str) -> RoutingRequest:
    return RoutingRequest(request_id=name, blocks=[], prompt_tokens=1)


def joined(name: str = "w/0") -> WorkerJoined:
    return WorkerJoined(profile=WorkerProfile(worker=WorkerId(name), worker_class="L40", capacity_tokens=100))


def dispatcher_with(policy: Recording) -> Dispatcher:
    return Dispatcher(policy, now_ms=lambda: 1.0)


async def test_without_workers_a_request_is_refused_and_nothing_ends() -> None:
    policy = Recording()
    with pytest.raises(NoWorkerReadyError):
        await dispatcher_with(policy).place(request("a"))
    assert policy.outcomes() == []


async def test_a_reservation_is_released_by_the_first_end_only() -> None:
    policy = Recording()
    dispatcher = dispatcher_with(policy)
    dispatcher.tell(joined())
    with await dispatcher.place(request("a")) as reservation:
        assert dispatcher.in_flight(WorkerId("w/0")) == 1
        assert reservation.end(Outcome.COMPLETED, output_tokens=3)
        assert not reservation.end(Outcome.FAILED)
        reservation.first_token()
        reservation.prefix_arrived()
    assert policy.outcomes() == [Outcome.COMPLETED]
    assert dispatcher.dispatched == 0
    assert not any(isinstance(e, (FirstToken, PrefixArrived)) for e in policy.events)


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (None, Outcome.FAILED),
        (ValueError("a fault"), Outcome.FAILED),
        (asyncio.CancelledError(), Outcome.CANCELLED),
        (ConnectionResetError(), Outcome.CANCELLED),
    ],
)
async def test_leaving_the_context_releases_what_nobody_ended(error: BaseException | None, outcome: Outcome) -> None:
    policy = Recording()
    dispatcher = dispatcher_with(policy)
    dispatcher.tell(joined())
    try:
        with await dispatcher.place(request("a")):
            if error is not None:
                raise error
    except (ValueError, asyncio.CancelledError, ConnectionResetError):
        pass
    assert policy.outcomes() == [outcome]
    assert dispatcher.dispatched == 0


async def test_a_request_that_is_cancelled_at_the_moment_of_its_dispatch_is_released() -> None:
    policy = Recording()
    dispatcher = dispatcher_with(policy)
    dispatcher.tell(joined())
    first = await dispatcher.place(request("a"))
    second = asyncio.create_task(dispatcher.place(request("b")))
    await asyncio.sleep(0)
    first.end(Outcome.COMPLETED)  # makes room: b is dispatched
    assert dispatcher.in_flight(WorkerId("w/0")) == 1
    second.cancel()  # before it could take its place
    with pytest.raises(asyncio.CancelledError):
        await second
    assert policy.outcomes() == [Outcome.COMPLETED, Outcome.CANCELLED]
    assert dispatcher.dispatched == 0


async def test_a_request_that_leaves_before_its_dispatch_is_not_ended_twice() -> None:
    policy = Recording()
    dispatcher = dispatcher_with(policy)
    dispatcher.tell(joined())
    first = await dispatcher.place(request("a"))
    second = asyncio.create_task(dispatcher.place(request("b")))
    await asyncio.sleep(0)
    second.cancel()  # its task has not run yet as room appears
    first.end(Outcome.COMPLETED)
    with pytest.raises(asyncio.CancelledError):
        await second
    assert policy.each_arrival_ended_once()
    assert dispatcher.dispatched == 0


async def test_stop_refuses_those_who_wait_and_those_who_come() -> None:
    policy = Recording()
    dispatcher = dispatcher_with(policy)
    dispatcher.tell(joined())
    first = await dispatcher.place(request("a"))
    second = asyncio.create_task(dispatcher.place(request("b")))
    await asyncio.sleep(0)
    dispatcher.stop()
    with pytest.raises(StoppingError):
        await second
    with pytest.raises(StoppingError):
        await dispatcher.place(request("c"))
    first.end(Outcome.COMPLETED)
    assert policy.outcomes() == [Outcome.CANCELLED, Outcome.COMPLETED]


async def test_a_full_queue_is_an_error_with_the_time_to_come_again() -> None:
    policy = Recording(max_waiting=0)
    dispatcher = dispatcher_with(policy)
    dispatcher.tell(joined())
    first = await dispatcher.place(request("a"))
    with pytest.raises(OverloadedError) as refusal:
        await dispatcher.place(request("b"))
    assert refusal.value.retry_after_s == 1.0
    first.end(Outcome.COMPLETED)


async def test_an_id_that_comes_twice_is_a_fault_that_leaves_nothing() -> None:
    policy = Recording()
    dispatcher = dispatcher_with(policy)
    dispatcher.tell(joined())
    first = await dispatcher.place(request("a"))
    with pytest.raises(ValueError, match="a"):
        await dispatcher.place(request("a"))
    assert dispatcher.dispatched == 1
    first.end(Outcome.COMPLETED)


async def test_listeners_hear_each_change_of_their_worker() -> None:
    policy = Recording(at_once=9)
    dispatcher = dispatcher_with(policy)
    dispatcher.tell(joined())
    last_seen: list[int] = []
    stop = dispatcher.listen(WorkerId("w/0"), last_seen.append)
    reservations = [await dispatcher.place(request(n)) for n in "ab"]
    for reservation in reservations:
        reservation.end(Outcome.COMPLETED)
    assert last_seen == [1, 2, 1, 0]
    stop()
    (await dispatcher.place(request("c"))).end(Outcome.COMPLETED)
    assert last_seen == [1, 2, 1, 0]


async def test_a_request_on_a_worker_that_is_gone_still_ends() -> None:
    policy = Recording()
    dispatcher = dispatcher_with(policy)
    dispatcher.tell(joined())
    reservation = await dispatcher.place(request("a"))
    dispatcher.tell(WorkerGone(worker=WorkerId("w/0"), reason="gone"))
    reservation.end(Outcome.FAILED)
    assert dispatcher.dispatched == 0
