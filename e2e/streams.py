"""Live streams, and a steady load, through a pool's router."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import aiohttp

from e2e.pool import MODEL

_LIMIT = aiohttp.ClientTimeout(total=300)


@dataclass(frozen=True, kw_only=True, slots=True)
class Streamed:
    """How a stream ended. tokens: that its usage tells of; None if it was cut. fault: empty if all was well."""

    tokens: int | None
    fault: str = ""


async def stream(session: aiohttp.ClientSession, url: str, text: str, *, max_tokens: int) -> Streamed:
    """One chat answer, read to its end."""
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    tokens, done = None, False
    try:
        async with session.post(f"{url}/v1/chat/completions", json=body) as response:
            if response.status != 200:
                return Streamed(tokens=None, fault=f"{response.status}: {await response.text()}")
            async for line in response.content:
                data = line.decode().removeprefix("data: ").strip()
                if data == "[DONE]":
                    done = True
                elif data:
                    event = json.loads(data)
                    if "error" in event:
                        return Streamed(tokens=tokens, fault=data)
                    tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
    except aiohttp.ClientError as error:
        return Streamed(tokens=tokens, fault=f"{type(error).__name__}: {error}")
    return Streamed(tokens=tokens, fault="" if done else "the stream has no end")


@dataclass(kw_only=True, slots=True)
class Load:
    """What came of a steady load."""

    answered: int = 0
    faults: list[str] = field(default_factory=list)


@asynccontextmanager
async def steady_load(url: str, *, clients: int, max_tokens: int) -> AsyncIterator[Load]:
    """So many clients, each with one request after another, for as long as the context lasts."""
    load, ended = Load(), asyncio.Event()

    async def client(number: int, session: aiohttp.ClientSession) -> None:
        turn = 0
        while not ended.is_set():
            turn += 1
            text = f"client {number} asks again and again, in turn {turn}. " * 8
            result = await stream(session, url, text, max_tokens=max_tokens)
            if result.fault or result.tokens != max_tokens:
                load.faults.append(f"client {number}, turn {turn}: {result}")
            else:
                load.answered += 1

    async with aiohttp.ClientSession(timeout=_LIMIT) as session, asyncio.TaskGroup() as group:
        for number in range(clients):
            group.create_task(client(number, session))
        try:
            yield load
        finally:
            ended.set()


@asynccontextmanager
async def live_streams(url: str, *, number: int, max_tokens: int) -> AsyncIterator[list[asyncio.Task[Streamed]]]:
    """So many streams at the same time, each of another prompt; they are under way when the context begins."""
    async with aiohttp.ClientSession(timeout=_LIMIT, connector=aiohttp.TCPConnector(limit=0)) as session:
        tasks = [
            asyncio.create_task(
                stream(session, url, f"story number {n}: tell me all about it. " * (4 + n), max_tokens=max_tokens)
            )
            for n in range(number)
        ]
        try:
            yield tasks
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
