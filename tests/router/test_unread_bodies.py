"""Answers that come before the request's body is whole, by raw sockets: nothing of it is taken for another request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from kvrouting_router.options import SizeLimits
from tests.fakes.fake_http_engine import running_engine
from tests.router.router_under_test import (
    PATIENCE_S,
    RouterUnderTest,
    config,
    options,
    running_router,
)

CHAT = "/v1/chat/completions"
# What follows on the connection looks like a request of its own.
SMUGGLED = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"


def head(path: str = CHAT, *, length: int, kind: str = "application/json", more: str = "") -> bytes:
    lines = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\n{more}\r\n"
    return lines.encode()


@asynccontextmanager
async def router_with_worker(**times: float) -> AsyncIterator[RouterUnderTest]:
    settings = config(options=options(times=times, sizes=SizeLimits(max_body_bytes=1000)))
    async with running_engine() as engine, running_router(settings) as router:
        await router.sidecar(engine)
        yield router
        assert engine.seen == []


@asynccontextmanager
async def connected(router: RouterUnderTest) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", router.router.http_port)
    try:
        async with asyncio.timeout(PATIENCE_S):
            yield reader, writer
    finally:
        writer.transport.abort()


async def headers_of(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """Status and headers of the next answer; its body is read as well."""
    answer = (await reader.readuntil(b"\r\n\r\n")).lower()
    length = int(answer.partition(b"content-length: ")[2].partition(b"\r\n")[0])
    await reader.readexactly(length)
    return answer.split()[1], answer


@pytest.mark.parametrize(
    ("request_head", "status"),
    [
        (head(length=5000), b"413"),
        (head(length=len(SMUGGLED), kind="text/plain"), b"415"),
        (head(length=len(SMUGGLED), more="Content-Encoding: gzip\r\n"), b"415"),
        (head(length=len(SMUGGLED)), b"408"),
        (head("/v1/embeddings", length=len(SMUGGLED)), b"404"),
        (head("/workers", length=len(SMUGGLED)), b"405"),
        (head(length=5000, more="Expect: 100-continue\r\n"), b"413"),
        (head(length=10, kind="text/plain", more="Expect: 100-continue\r\n"), b"415"),
    ],
)
async def test_the_connection_is_said_to_close_and_what_still_comes_is_no_request(
    request_head: bytes, status: bytes
) -> None:
    async with router_with_worker(client_read_s=0.2) as router, connected(router) as (reader, writer):
        writer.write(request_head)
        got, headers = await headers_of(reader)
        assert (got, b"connection: close" in headers) == (status, True)
        writer.write(SMUGGLED)
        writer.write_eof()
        assert await reader.read() == b""


async def test_a_body_without_a_length_that_grows_too_large_closes_too() -> None:
    async with router_with_worker() as router, connected(router) as (reader, writer):
        start = (
            f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        writer.write(start.encode() + b"7d0\r\n" + b"x" * 2000 + b"\r\n")
        got, headers = await headers_of(reader)
        assert (got, b"connection: close" in headers) == (b"413", True)
        writer.write(b"0\r\n\r\n" + SMUGGLED)
        assert await reader.read() == b""


async def test_a_client_that_goes_on_sending_reads_its_answer() -> None:
    """No reset throws away what was answered."""
    async with router_with_worker() as router, connected(router) as (reader, writer):
        writer.write(head(length=20_000_000))
        for _ in range(20):
            writer.write(b"x" * 1_000_000)
            await writer.drain()
        got, headers = await headers_of(reader)
        assert (got, b"connection: close" in headers) == (b"413", True)
        assert await reader.read() == b""


@pytest.mark.parametrize("path", [CHAT, "/v1/embeddings"])
async def test_a_request_that_is_whole_keeps_its_connection(path: str) -> None:
    async with router_with_worker() as router, connected(router) as (reader, writer):
        for _ in range(2):
            writer.write(head(path, length=2) + b"[]")
            got, headers = await headers_of(reader)
            assert (got, b"connection: close" in headers) == (b"400" if path == CHAT else b"404", False)
