"""One HTTP request to one engine."""

from __future__ import annotations

import asyncio
import io
import socket
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import aiohttp
from multidict import CIMultiDict
from yarl import URL

from kvrouting_router.errors import UpstreamError
from kvrouting_router.http_headers import RANK_HEADER
from kvrouting_router.options import TimeLimits
from kvrouting_router.request_forms import Api
from kvrouting_router.worker_registry import WorkerFacts

# uvicorn, which SGLang runs on, closes idle connections after 5 s: ours go before, so that none dies as it is reused.
_KEEPALIVE_S = 4.0
# A host that vanished without a word is noticed after about half a minute, also below a silent answer.
_KEEPALIVE_PROBES = (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))
# aiohttp warns of larger bodies in one piece: they would hold the loop while they are copied to the socket.
_WHOLE_BODY_BYTES = 512 * 1024

UPSTREAM_FAILURES = (aiohttp.ClientError, ConnectionError, OSError)


def _engine_socket(address: Any) -> socket.socket:
    family, kind, protocol, _, _ = address
    connection = socket.socket(family=family, type=kind, proto=protocol)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE_PROBES:
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return connection


@lru_cache(maxsize=4096)
def engine_url(endpoint: str, path: str) -> URL:
    """The address of a path of an engine, parsed once."""
    return URL(endpoint.rstrip("/") + path)


class Upstream:
    """Connections to all engines. Made on the event loop, closed by `close`."""

    def __init__(self, times: TimeLimits, *, engine_key: str | None) -> None:
        self._engine_key = engine_key
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S, socket_factory=_engine_socket),
            # Waits are limited where they happen; only connecting is left to the library.
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=times.connect_s),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("Accept", "Accept-Encoding", "User-Agent", "Content-Type"),
        )

    async def post(
        self,
        facts: WorkerFacts,
        api: Api,
        *,
        query: str,
        body: bytes,
        headers: CIMultiDict[str],
        trace_headers: Mapping[str, str],
    ) -> aiohttp.ClientResponse:
        """Sends a generation request; returns when the engine's headers are there. The caller closes the response.

        Raises: UpstreamError if the engine cannot be reached or breaks off.
        """
        headers = headers.copy()
        headers.update(trace_headers)
        if self._engine_key is not None:
            headers["Authorization"] = f"Bearer {self._engine_key}"
        if facts.dp_size > 1:
            headers[RANK_HEADER] = str(facts.dp_rank)
            if api is Api.GENERATE:
                body = pinned_to_rank(body, facts.dp_rank)
        data = body if len(body) <= _WHOLE_BODY_BYTES else io.BytesIO(body)
        path = f"{api.value}?{query}" if query else api.value
        try:
            return await self._session.post(
                engine_url(facts.endpoint, path), data=data, headers=headers, allow_redirects=False
            )
        except UPSTREAM_FAILURES as error:
            raise unreachable(facts, error) from error

    async def get(self, endpoint: str, path: str, *, limit_s: float) -> tuple[int, CIMultiDict[str], bytes]:
        """A small page of an engine: status, headers, body. Raises: UpstreamError, TimeoutError."""
        headers = {"Authorization": f"Bearer {self._engine_key}"} if self._engine_key is not None else {}
        try:
            async with asyncio.timeout(limit_s):
                response = await self._session.get(engine_url(endpoint, path), headers=headers)
                async with response:
                    return response.status, CIMultiDict(response.headers), await response.read()
        except UPSTREAM_FAILURES as error:
            if isinstance(error, TimeoutError):
                raise
            raise UpstreamError(f"{endpoint}{path}: {describe(error)}") from error

    async def close(self) -> None:
        """Closes all connections."""
        await self._session.close()


def pinned_to_rank(body: bytes, dp_rank: int) -> bytes:
    """The JSON object with SGLang's own rank field added as its last one, where it overrules an earlier one."""
    end = body.rstrip()
    separator = b"" if end[:-1].rstrip().endswith(b"{") else b","
    return end[:-1] + separator + b'"routed_dp_rank":' + str(dp_rank).encode() + b"}"


def describe(error: BaseException) -> str:
    """An error of the HTTP client in a few words."""
    return str(error) or type(error).__name__


def unreachable(facts: WorkerFacts, error: BaseException) -> UpstreamError:
    """The engine could not be reached or broke off."""
    return UpstreamError(f"worker {facts.worker} at {facts.endpoint}: {describe(error)}")
