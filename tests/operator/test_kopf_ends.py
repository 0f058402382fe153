"""kopf on real sockets before an API server that breaks its watch: it ends with the reason, and ends nothing else."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from kubernetes import client

from kvrouting_operator.crd import GROUP, PLURAL, VERSION
from kvrouting_operator.handlers import kopf_settings
from kvrouting_operator.process import run_kopf
from kvrouting_operator.settings import OperatorSettings
from tests.operator.pools import IMAGES

SETTINGS = OperatorSettings(images=IMAGES)
POOL = {"metadata": {"name": "a", "namespace": "n", "uid": "u", "resourceVersion": "5"}, "spec": {}}
SERVED = {
    "/api/v1": [("pods", "Pod"), ("namespaces", "Namespace")],
    "/apis/apps/v1": [("deployments", "Deployment")],
    f"/apis/{GROUP}/{VERSION}": [(PLURAL, "KVRoutingPool")],
}


class Seen:
    """The operation's side of the handlers."""

    def __init__(self) -> None:
        self.pools: list[str] = []
        self.shown = asyncio.Event()

    def pool_changed(self, _kind: str | None, raw: Any) -> None:
        self.pools.append(raw["metadata"]["name"])
        self.shown.set()

    def owned_changed(self, _raw: Any) -> None:
        """None is served."""


def described(names: list[tuple[str, str]]) -> dict[str, Any]:
    verbs = ["get", "list", "watch"]
    return {
        "resources": [
            {"name": n, "singularName": "", "namespaced": True, "kind": k, "verbs": verbs, "shortNames": []}
            for n, k in names
        ]
    }


@asynccontextmanager
async def api_server(seen: Seen, last_line: bytes) -> AsyncIterator[client.Configuration]:
    """Its watch of pools shows one; once that was seen it sends the last line."""

    async def answer(request: web.Request) -> web.StreamResponse:
        if request.path == "/api":
            return web.json_response({"versions": ["v1"]})
        if request.path == "/apis":
            groups = [("apps", "v1"), (GROUP, VERSION)]
            versions = [
                {"name": g, "versions": [{"version": v}], "preferredVersion": {"version": v}} for g, v in groups
            ]
            return web.json_response({"groups": versions})
        if request.path in SERVED:
            return web.json_response(described(SERVED[request.path]))
        if "watch" not in request.query:
            return web.json_response({"metadata": {"resourceVersion": "1"}, "items": []})
        stream = web.StreamResponse()
        await stream.prepare(request)
        if PLURAL in request.path:
            await stream.write(json.dumps({"type": "MODIFIED", "object": POOL}).encode() + b"\n")
            await seen.shown.wait()
            await stream.write(last_line)
        await asyncio.Event().wait()
        return stream

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    configuration = client.Configuration()
    configuration.host = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield configuration
    finally:
        await runner.cleanup()


@pytest.mark.parametrize(
    ("last_line", "error"),
    [
        (b'{"type": nonsense\n', ValueError),
        (b'{"type": "ADDED", "object": {}}\n', KeyError),
        (b'{"type": "ERROR", "object": {"code": 500, "message": "etcd"}}\n', Exception),
    ],
)
async def test_what_breaks_the_watch_ends_it_and_no_task_of_ours(last_line: bytes, error: type[Exception]) -> None:
    seen = Seen()
    async with api_server(seen, last_line) as configuration:
        running = asyncio.create_task(run_kopf(seen, SETTINGS, configuration))  # type: ignore[arg-type]
        await seen.shown.wait()
        ours = asyncio.create_task(asyncio.Event().wait())
        with pytest.raises(error):
            await running
        assert seen.pools == ["a"]
        assert not ours.done()
        ours.cancel()


async def test_it_ends_when_it_is_told_to() -> None:
    seen = Seen()
    async with api_server(seen, b"") as configuration:
        running = asyncio.create_task(run_kopf(seen, SETTINGS, configuration))  # type: ignore[arg-type]
        await seen.shown.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running


def test_it_does_not_kill_the_process_that_outlives_it() -> None:
    assert kopf_settings(SETTINGS).process.ultimate_exiting_timeout is None
