"""The sidecar's pages: alive, ready and why not, metrics, drain."""

from __future__ import annotations

import hmac
from dataclasses import asdict

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from kvrouting_sidecar.drain import Drain
from kvrouting_sidecar.readiness import Check
from kvrouting_sidecar.settings import DrainSettings
from kvrouting_sidecar.sidecar import Sidecar

_SIDECAR: web.AppKey[Sidecar] = web.AppKey("sidecar", Sidecar)
_REGISTRY: web.AppKey[CollectorRegistry] = web.AppKey("registry", CollectorRegistry)


def build_pages(sidecar: Sidecar, registry: CollectorRegistry) -> web.Application:
    """`/healthz`, `/readyz`, `/metrics` and `/drain`."""
    pages = web.Application()
    pages[_SIDECAR] = sidecar
    pages[_REGISTRY] = registry
    pages.router.add_get("/healthz", _alive)
    pages.router.add_get("/readyz", _ready)
    pages.router.add_get("/metrics", _metrics)
    pages.router.add_get("/drain", _drain)
    pages.router.add_post("/drain", _drain)
    return pages


async def _alive(_: web.Request) -> web.Response:
    return web.json_response({"status": "alive"})


async def _ready(request: web.Request) -> web.Response:
    checks = request.app[_SIDECAR].readiness()
    ready = is_ready(checks)
    body = {
        "ready": ready,
        "checks": {
            check.name: {"holds": check.holds, "required": check.required, "reason": check.reason} for check in checks
        },
    }
    return web.json_response(body, status=200 if ready else 503)


def is_ready(checks: list[Check]) -> bool:
    """All that is required holds."""
    return all(check.holds for check in checks if check.required)


async def _metrics(request: web.Request) -> web.Response:
    body = generate_latest(request.app[_REGISTRY])
    return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})


async def _drain(request: web.Request) -> web.Response:
    sidecar = request.app[_SIDECAR]
    refusal = _refusal(request, sidecar.settings.drain)
    if refusal:
        return web.json_response({"error": refusal}, status=403)
    drain: Drain = sidecar.drain
    result = await drain.drain(f"asked by {request.remote}")
    return web.json_response(asdict(result))


def _refusal(request: web.Request, settings: DrainSettings) -> str:
    """Why this caller may not drain; empty if it may."""
    if settings.token is None:
        return "draining is off: the sidecar was started without a drain token (--drain-token-file)"
    shown = request.headers.get(settings.header)
    if shown is None:
        return f"the header {settings.header} is missing"
    if not hmac.compare_digest(shown.encode(), settings.token.encode()):
        return f"the header {settings.header} does not hold the pool's drain token"
    return ""
