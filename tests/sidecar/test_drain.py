"""A drain waits for the routers' acknowledgements, and for nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from kvrouting_sidecar.drain import DrainResult
from kvrouting_sidecar.process import pages_of
from kvrouting_sidecar.settings import DrainSettings
from kvrouting_sidecar.sidecar import Sidecar
from tests.fakes.fake_engine import FakeEngine
from tests.fakes.fake_router import FakeRouter
from tests.fakes.running_sidecar import NameServer, eventually, running_sidecar

_TOKEN = {"x-kvrouting-drain-token": "drain-token"}


class _Pages:
    """A client of one sidecar's pages."""

    def __init__(self, sidecar: Sidecar, client: aiohttp.ClientSession, url: str) -> None:
        self.sidecar = sidecar
        self._client = client
        self._url = url

    async def drain(self, headers: dict[str, str] | None = None) -> tuple[int, dict[str, Any]]:
        async with self._client.post(f"{self._url}/drain", headers=_TOKEN if headers is None else headers) as answer:
            return answer.status, await answer.json()

    def count_callers(self) -> list[str]:
        """The reasons of all that ask for a drain from now on."""
        asked: list[str] = []
        drain = self.sidecar.drain.drain

        async def counted(reason: str) -> DrainResult:
            asked.append(reason)
            return await drain(reason)

        self.sidecar.drain.drain = counted  # type: ignore[method-assign]
        return asked


@asynccontextmanager
async def _pages(engine: FakeEngine, *routers: FakeRouter, **changes: Any) -> AsyncIterator[_Pages]:
    async with (
        running_sidecar(engine, *routers, **changes) as sidecar,
        pages_of(sidecar, host="127.0.0.1", port=0) as port,
        aiohttp.ClientSession() as client,
    ):
        await eventually(lambda: all(router.blocks() is not None for router in routers))
        yield _Pages(sidecar, client, f"http://127.0.0.1:{port}")


async def test_a_drain_ends_when_no_router_has_a_request_under_way() -> None:
    async with FakeEngine() as engine, FakeRouter() as busy, FakeRouter() as idle, _pages(engine, busy, idle) as pages:
        busy.requests_under_way = 2
        draining = asyncio.create_task(pages.drain())
        await eventually(lambda: busy.streams[0].draining and idle.streams[0].draining)
        await asyncio.sleep(0.3)
        assert not draining.done()
        busy.finish_requests()
        status, body = await draining
        assert status == 200
        assert body["drained"] is True
        assert body["routers"] == 2
        assert body["remaining"] == 0


async def test_a_drain_gives_up_at_its_limit_and_says_what_remains() -> None:
    drain = DrainSettings(token="drain-token", limit_s=1.0)
    async with (
        FakeEngine() as engine,
        FakeRouter() as busy,
        FakeRouter() as silent,
        _pages(engine, busy, silent, drain=drain) as pages,
    ):
        busy.requests_under_way, silent.answers_drain = 3, False
        _, body = await pages.drain()
        assert body["drained"] is False
        assert body["remaining"] == 3
        assert body["silent"] == [f"127.0.0.1:{silent.port}"]


async def test_callers_share_one_drain_and_a_later_one_announces_anew() -> None:
    async with FakeEngine() as engine, FakeRouter() as router, _pages(engine, router) as pages:
        router.requests_under_way = 1
        asked = pages.count_callers()
        callers = [asyncio.create_task(pages.drain()) for _ in range(3)]
        await eventually(lambda: router.streams[0].draining and len(asked) == 3)
        router.finish_requests()
        answers = await asyncio.gather(*callers)
        assert len(router.streams[0].draining) == 1
        assert answers[0] == answers[1] == answers[2]
        status, body = await pages.drain()
        assert (status, body["drained"]) == (200, True)
        assert len(router.streams[0].draining) == 2


async def test_a_caller_that_leaves_does_not_stop_the_drain() -> None:
    async with FakeEngine() as engine, FakeRouter() as router, _pages(engine, router) as pages:
        router.requests_under_way = 1
        caller = asyncio.create_task(pages.drain())
        await eventually(lambda: router.streams[0].draining)
        caller.cancel()
        await asyncio.gather(caller, return_exceptions=True)
        assert pages.sidecar.drain.under_way
        router.finish_requests()
        await eventually(lambda: pages.sidecar.drain.latest)
        assert pages.sidecar.drain.latest is not None
        assert pages.sidecar.drain.latest.drained


async def test_a_router_that_has_vanished_does_not_hold_the_drain() -> None:
    async with FakeEngine() as engine, FakeRouter() as gone, FakeRouter() as broken:
        names = NameServer([gone, broken])
        async with _pages(engine, gone, broken, name_server=names) as pages:
            gone.requests_under_way = broken.requests_under_way = 5
            draining = asyncio.create_task(pages.drain())
            await eventually(lambda: gone.streams[0].draining and broken.streams[0].draining)
            names.addresses[names.names[0]] = frozenset()
            await broken.stop()
            _, body = await draining
            assert body["drained"] is True


async def test_a_router_that_comes_during_a_drain_is_told() -> None:
    async with FakeEngine() as engine, FakeRouter() as router, FakeRouter() as late:
        names = NameServer([router, late])
        names.addresses[names.names[1]] = frozenset()
        async with _pages(engine, router, name_server=names) as pages:
            router.requests_under_way = 1
            draining = asyncio.create_task(pages.drain())
            await eventually(lambda: router.streams[0].draining)
            names.addresses[names.names[1]] = frozenset({"127.0.0.1"})
            await eventually(lambda: late.worker() and late.streams[0].draining)
            router.finish_requests()
            _, body = await draining
            assert body["drained"] is True


async def test_only_who_holds_the_token_may_drain() -> None:
    async with FakeEngine() as engine, FakeRouter() as router, _pages(engine, router) as pages:
        missing, why_missing = await pages.drain({})
        wrong, why_wrong = await pages.drain({"x-kvrouting-drain-token": "guess"})
        assert (missing, wrong) == (403, 403)
        assert "missing" in why_missing["error"]
        assert "does not hold" in why_wrong["error"]
        assert router.streams[0].draining == []


async def test_the_header_is_an_option_and_without_a_token_nobody_drains() -> None:
    async with FakeEngine() as engine, FakeRouter() as router:
        named = DrainSettings(token="t", header="x-pool-drain")
        async with _pages(engine, router, drain=named) as pages:
            assert (await pages.drain({"x-pool-drain": "t"}))[0] == 200
            assert (await pages.drain())[0] == 403
        async with _pages(engine, router, drain=DrainSettings()) as pages:
            status, body = await pages.drain()
            assert status == 403
            assert "--drain-token-file" in body["error"]
