"""What the HTTP surface tells a tracer of each request. With tracing off nothing is made."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from aiohttp import web

from kvrouting_simulator.engine_process.generation import Generation
from kvrouting_simulator.engine_process.http_answers import Handler

_GENERATIONS = "kvrouting.generations"


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """One HTTP request that has been answered, or given up. offset_s: from the loop's clock to seconds since 1970.

    headers: the request's, with its trace context.
    """

    headers: Mapping[str, str]
    generations: Sequence[Generation]
    offset_s: float


class Tracer(Protocol):
    """Makes spans of what was served."""

    def served(self, request: Served, /) -> None:
        """A request has ended."""

    def close(self) -> None:
        """Sends what is left; may block."""


def started(request: web.Request, generations: Sequence[Generation]) -> None:
    """The request runs as these generations."""
    request[_GENERATIONS] = generations


class Tracing:
    """Hands each request that ran to the tracer when its answer has been sent, or its client has left."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Of the whole application."""
        try:
            return await handler(request)
        finally:
            generations = request.get(_GENERATIONS)
            if generations is not None:
                offset_s = time.time() - asyncio.get_running_loop().time()
                self._tracer.served(Served(headers=request.headers, generations=generations, offset_s=offset_s))
