"""The process around one sidecar: its pages, its signals, its end."""

from __future__ import annotations

import asyncio
import logging
import random
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from os import strerror

from aiohttp import web

from kvrouting_sidecar.http_pages import build_pages
from kvrouting_sidecar.metrics import build_registry
from kvrouting_sidecar.router_names import resolve
from kvrouting_sidecar.settings import Settings
from kvrouting_sidecar.sidecar import Sidecar

_log = logging.getLogger(__name__)


class ListenError(Exception):
    """The pages cannot be served where they were to be; the message says what to change."""


async def serve(settings: Settings) -> None:
    """Until SIGTERM or SIGINT. Raises: ListenError."""
    sidecar = Sidecar(settings, resolver=resolve, clock_s=time.monotonic, rng=random.Random())
    loop = asyncio.get_running_loop()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, sidecar.stop)
    async with pages_of(sidecar, host=settings.http_host, port=settings.http_port) as port:
        _log.info("listening", extra={"http": port, "pool": settings.pool, "pod_uid": settings.pod_uid})
        await sidecar.run()
    _log.info("stopped")


@asynccontextmanager
async def pages_of(sidecar: Sidecar, *, host: str, port: int) -> AsyncIterator[int]:
    """The sidecar's pages, served. Yields: the port. Raises: ListenError."""
    runner = web.AppRunner(build_pages(sidecar, build_registry(sidecar)), access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as error:
            number = error.errno or 0  # below 0: the name could not be looked up
            reason = strerror(number) if number > 0 else error.strerror
            raise ListenError(
                f"cannot listen on {host}:{port} ({reason}): choose another place with --http-host and --http-port"
            ) from error
        yield int(runner.addresses[0][1])
    finally:
        await runner.cleanup()
