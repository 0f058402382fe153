"""The pages that the kubelet asks."""

from __future__ import annotations

from aiohttp import web

from kvrouting_operator.operation import Operation

_OPERATION: web.AppKey[Operation] = web.AppKey("operation", Operation)


def probe_pages(operation: Operation) -> web.Application:
    """`/healthz`: the watch brings news and pools are looked at. `/readyz`: pools can be listed and watched."""
    pages = web.Application()
    pages[_OPERATION] = operation
    pages.router.add_get("/healthz", _alive)
    pages.router.add_get("/readyz", _ready)
    return pages


async def _alive(request: web.Request) -> web.Response:
    reason = request.app[_OPERATION].why_not_alive()
    return web.Response(status=503 if reason else 200, text=f"{reason or 'ok'}\n")


async def _ready(request: web.Request) -> web.Response:
    reason = request.app[_OPERATION].why_not_ready()
    return web.Response(status=503 if reason else 200, text=f"{reason or 'ok'}\n")
