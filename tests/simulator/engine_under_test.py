"""A simulated engine in a process of its own, and plain ZeroMQ clients for what it publishes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

_EPHEMERAL = (
    "--port", "0", "--kv-events-port", "0", "--replay-port", "0", "--load-port", "0", "--state-port", "0",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Engine:
    """A running engine. ports: bases by family, as its `listening` line gives them."""

    process: asyncio.subprocess.Process
    ports: Mapping[str, int]
    http: aiohttp.ClientSession

    async def generate(self, **body: Any) -> Any:
        """POST /generate that must succeed."""
        return await self.post("/generate", body)

    async def post(self, path: str, body: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Any:
        """POST that must end with `status`; the JSON, or None for a body that is none."""
        async with self.http.post(path, json=body, headers=headers) as response:
            text = await response.text()
            assert response.status == status, text
            return json.loads(text) if response.content_type == "application/json" else None

    async def get(self, path: str, *, status: int = 200) -> Any:
        """GET that must end with `status`; JSON or text."""
        async with self.http.get(path) as response:
            text = await response.text()
            assert response.status == status, text
            return json.loads(text) if response.content_type == "application/json" else text

    async def stream(self, path: str, body: Any) -> list[str]:
        """The `data:` lines of a streamed answer, as they stand."""
        async with self.http.post(path, json=body) as response:
            assert response.status == 200, await response.text()
            assert response.headers["Content-Type"].startswith("text/event-stream")
            events = (await response.text()).split("\n\n")
        assert events.pop() == ""
        assert all(event.startswith("data: ") for event in events)
        return [event.removeprefix("data: ") for event in events]

    async def misbehave(self, action: str, **fields: Any) -> None:
        """Orders a fault."""
        await self.post("/misbehave", {"action": action, **fields})

    async def loads(self, rank: int = 0) -> Mapping[str, Any]:
        """A rank's load."""
        loads: Mapping[str, Any] = (await self.get("/v1/loads"))["loads"][rank]
        return loads

    async def until_idle(self) -> None:
        """Returns when nothing runs or waits."""
        async with asyncio.timeout(60):
            while (load := await self.loads())["num_running_reqs"] + load["num_waiting_reqs"]:
                await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def running_engine(*options: str, speed: float = 50) -> AsyncIterator[Engine]:
    """Starts an engine on free ports and ends it with SIGTERM, which must give exit code 0."""
    async with launched(*_EPHEMERAL, "--allow-misbehave", "--speed", str(speed), *options) as engine:
        yield engine
        if engine.process.returncode is None:
            engine.process.terminate()
            assert await asyncio.wait_for(engine.process.wait(), 60) == 0


@contextlib.asynccontextmanager
async def launched(*options: str) -> AsyncIterator[Engine]:
    """Starts an engine with exactly these options; kills it if it is still there at the end."""
    command = (sys.executable, "-m", "kvrouting_simulator.engine_process", *options)
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    assert process.stderr is not None
    logged: list[str] = []
    try:
        ports = await asyncio.wait_for(_listening(process.stderr, logged), 60)
        drained = asyncio.create_task(_drain(process.stderr, logged))
        async with aiohttp.ClientSession(f"http://127.0.0.1:{ports['http']}") as http:
            yield Engine(process=process, ports=ports, http=http)
        drained.cancel()
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _listening(stderr: asyncio.StreamReader, logged: list[str]) -> Mapping[str, int]:
    while line := await stderr.readline():
        logged.append(line.decode())
        with contextlib.suppress(json.JSONDecodeError):
            entry: dict[str, Any] = json.loads(line)
            if entry.pop("event") == "listening":
                return entry
    raise AssertionError("the engine ended before it listened: " + "".join(logged))


async def _drain(stderr: asyncio.StreamReader, logged: list[str]) -> None:
    while line := await stderr.readline():
        logged.append(line.decode())


class EventReader:
    """A subscriber that applies what it hears to a set of page hashes, the plain definition of a mirror."""

    def __init__(self, socket: Any) -> None:
        self._socket = socket
        self.frames: list[Sequence[bytes]] = []
        self.sequences: list[int] = []
        self.pages: set[int] = set()

    async def read(self, batches: int) -> list[Any]:
        """Reads so many batches; returns them decoded."""
        return [await asyncio.wait_for(self._one(), 30) for _ in range(batches)]

    async def until(self, sequence: int) -> None:
        """Reads until the batch before this sequence number was seen."""
        while not self.sequences or self.sequences[-1] < sequence - 1:
            await self.read(1)

    async def _one(self) -> Any:
        frames = await self._socket.recv_multipart()
        self.frames.append(frames)
        self.sequences.append(int.from_bytes(frames[1], "big"))
        batch = msgspec.msgpack.decode(frames[2])
        apply_events(self.pages, batch[1])
        return batch


def apply_events(pages: set[int], events: Sequence[Mapping[str, Any]]) -> None:
    """Changes a set of live page hashes by events."""
    for event in events:
        if event["type"] == "BlockStored":
            pages.update(event["block_hashes"])
        elif event["type"] == "BlockRemoved":
            pages.difference_update(event["block_hashes"])
        else:
            pages.clear()


def digest(pages: set[int]) -> int:
    """Sum of the hashes as unsigned numbers modulo 2^64."""
    return sum(page % 2**64 for page in pages) % 2**64
