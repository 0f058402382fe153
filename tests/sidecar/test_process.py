"""The sidecar as a process: signals, environment, exit code."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest

from tests.fakes.fake_engine import FakeEngine
from tests.fakes.fake_router import FakeRouter
from tests.fakes.running_sidecar import BLOCK_SIZE, HASH_KEY, eventually, in_step, running_sidecar

pytestmark = pytest.mark.processes


@asynccontextmanager
async def _process(engine: FakeEngine, router: FakeRouter, **options: str) -> AsyncIterator[tuple[Process, int]]:
    """Yields: the process, and the port of its pages."""
    values = {
        "POOL": "pool-a",
        "POD_UID": "pod-1",
        "ENGINE_URL": engine.url,
        "ROUTERS": f"127.0.0.1:{router.port}",
        "HASH_KEY": HASH_KEY.hex(),
        "BLOCK_SIZE": str(BLOCK_SIZE),
        "STATE_ENDPOINT": engine.state_endpoint,
        "VERIFY_INTERVAL": "0.2",
        "HTTP_HOST": "127.0.0.1",
        "HTTP_PORT": "0",
    }
    environment = {f"KVROUTING_SIDECAR_{name}": value for name, value in (values | options).items()}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "kvrouting_sidecar", env=os.environ | environment, stdout=DEVNULL, stderr=PIPE
    )
    assert process.stderr is not None
    try:
        async with asyncio.timeout(30):
            line = json.loads(await process.stderr.readline())
            while line["event"] != "listening":
                line = json.loads(await process.stderr.readline())
        reading = asyncio.create_task(process.stderr.read())
        yield process, line["http"]
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGCONT)
            process.kill()
        await process.wait()
        await reading


async def test_sigterm_says_farewell_and_ends_with_success() -> None:
    async with FakeEngine() as engine, FakeRouter() as router, _process(engine, router) as (process, port):
        engine.ranks[0].store(list(range(100)))
        await in_step(engine, router)
        async with aiohttp.ClientSession() as client, client.get(f"http://127.0.0.1:{port}/readyz") as answer:
            assert answer.status == 200
        process.terminate()
        async with asyncio.timeout(30):
            assert await process.wait() == 0
        assert router.streams[0].draining == ["the worker's sidecar stops"]
        assert router.streams[0].in_order


async def test_sigterm_ends_it_before_the_engine_is_there() -> None:
    engine = FakeEngine()
    await engine.start()
    await engine.stop()
    async with FakeRouter() as router, _process(engine, router) as (process, _):
        process.terminate()
        async with asyncio.timeout(30):
            assert await process.wait() == 0


async def test_a_frozen_sidecar_disturbs_nobody_and_recovers() -> None:
    async with (
        FakeEngine(replay_batches=50) as engine,
        FakeRouter() as router,
        FakeRouter() as witness,
        running_sidecar(engine, witness),
        _process(engine, router) as (process, _),
    ):
        rank = engine.ranks[0]
        rank.store(list(range(100)))
        await in_step(engine, router, witness)
        process.send_signal(signal.SIGSTOP)
        for turn in range(300):
            rank.store([turn, *range(1000, 1600)])
            rank.trim([turn, *range(1000, 1600)], keep_pages=turn % 40)
        await in_step(engine, witness)
        process.send_signal(signal.SIGCONT)
        await in_step(engine, router)
        worker = router.worker()
        assert worker is not None
        await eventually(lambda: worker.heartbeats[-1].end_to_end_verified)
