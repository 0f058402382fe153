"""After every loss the router's view is the real tree again; no engine feels a sidecar that stands still."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from typing import Any

import aiohttp
import pytest

from tests.engine.real.conftest import SMALL_BUFFERS
from tests.engine.real.servers import RealServer
from tests.engine.real.whole_path import PATIENCE_S, RealLoad, RealPool, eventually
from tests.engine_sockets import ask_state

pytestmark = [pytest.mark.timeout(1200), pytest.mark.asyncio(loop_scope="session")]

FROZEN_S, CALM_S = 60.0, 15.0
WINDOW_S = 5.0


async def state_of(server: RealServer) -> dict[str, Any]:
    (state,) = await ask_state(server.ports.state, "state", seconds=30)
    found: dict[str, Any] = state
    return found


async def publish_batches(server: RealServer, count: int, *, seed: int) -> None:
    """Lets the engine publish so many more batches, all of requests that no router sees."""
    load = RealLoad(seed=seed)
    wanted = (await state_of(server))["sequence"] + count
    while (await state_of(server))["sequence"] < wanted:
        await asyncio.to_thread(server.generate, load.prompt())


@pytest.mark.parametrize("name", ["page1", "page16"])
async def test_a_sidecar_that_comes_too_late_for_the_replay_is_exact_without_a_flush(pool: RealPool, name: str) -> None:
    server, sidecar = pool.servers[name], pool.sidecars[name]
    await RealLoad(seed=11).through(pool, requests=20)
    before = await state_of(server)
    await sidecar.kill()
    await publish_batches(server, 2 * SMALL_BUFFERS["buffer_steps"], seed=12)
    await sidecar.start()
    await sidecar.wait_for_event("listening", timeout_s=PATIENCE_S)
    await pool.until_exact()
    blocks = await pool.until_views_equal_engines()
    after = await state_of(server)
    assert blocks[f"{name}/0"] > 0
    assert after["epoch"] == before["epoch"]
    assert after["cached_tokens"] > server.page_size * 10
    assert await pool.sidecar_count(name, "engine_snapshots_total") >= 1


async def test_a_killed_engine_comes_back_as_another_and_the_view_is_its_tree_again(pool: RealPool) -> None:
    server, load = pool.servers["page16"], RealLoad(seed=13)
    before = await state_of(server)
    ending = asyncio.Event()

    async def noticed() -> bool:
        return bool((await pool.workers())["page16/0"]["state"] != "live")

    async def works() -> bool:
        return bool((await state_of(server))["sequence"] > before["sequence"] + 3)

    async def kill_under_load() -> None:
        await eventually(works, what=lambda: "nothing reaches the engine that is to be killed")
        await asyncio.to_thread(server.stop)
        await eventually(noticed, what=lambda: "the router still takes the killed engine for live")
        ending.set()

    async with asyncio.TaskGroup() as tasks:
        answering = tasks.create_task(load.through(pool, until=ending, clients=3))
        tasks.create_task(kill_under_load())
    meanwhile = await load.through(pool, requests=4, clients=2)
    assert {answer.status for answer in (*answering.result(), *meanwhile)} == {200}
    assert {answer.worker for answer in meanwhile} == {"page1/0"}

    server.start()
    await asyncio.to_thread(server.wait_until_ready)
    await pool.until_exact()
    assert (await state_of(server))["epoch"] != before["epoch"]
    await load.through(pool, requests=30)
    blocks = await pool.until_views_equal_engines()
    assert blocks["page16/0"] > 0


class DecodeSteps:
    """A few streams at a time straight to one engine: when each token came."""

    def __init__(self, server: RealServer, *, seed: int) -> None:
        self._server = server
        self._load = RealLoad(seed=seed)
        self._came_s: list[float] = []

    async def run(self, until: asyncio.Event, *, clients: int = 2) -> None:
        async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as running:
            for _ in range(clients):
                running.create_task(self._client(session, until))

    async def _client(self, session: aiohttp.ClientSession, until: asyncio.Event) -> None:
        while not until.is_set():
            body = {
                "input_ids": self._load.prompt(),
                "sampling_params": {"max_new_tokens": 12, "ignore_eos": True},
                "stream": True,
            }
            async with session.post(f"{self._server.url}/generate", json=body) as response:
                assert response.status == 200
                async for line in response.content:
                    if line.startswith(b"data: {"):
                        assert "meta_info" in json.loads(line[6:])
                        self._came_s.append(time.monotonic())

    @property
    def begun(self) -> bool:
        return bool(self._came_s)

    def in_windows(self, start_s: float, end_s: float) -> Sequence[int]:
        """How many steps there were in each whole window of this time."""
        windows = [0] * int((end_s - start_s) // WINDOW_S)
        for at_s in self._came_s:
            place = int((at_s - start_s) // WINDOW_S)
            if 0 <= place < len(windows):
                windows[place] += 1
        return windows


async def test_an_engine_does_not_feel_a_sidecar_that_stands_still(pool: RealPool, quiet: None) -> None:
    """Judged by its best windows: what else the machine does makes some of them slow, a publisher that waits for the
    sidecar makes all of them slow, and the last ones empty.
    """
    server, sidecar = pool.servers["page1"], pool.sidecars["page1"]
    steps, ending = DecodeSteps(server, seed=21), asyncio.Event()

    async def begun() -> bool:
        return steps.begun

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(steps.run(ending))
        await eventually(begun, what=lambda: "no token came")
        calm_s = time.monotonic()
        await asyncio.sleep(CALM_S)
        freeze_s, at_freeze = time.monotonic(), await state_of(server)
        sidecar.freeze()
        try:
            await asyncio.sleep(FROZEN_S)
            resume_s, at_resume = time.monotonic(), await state_of(server)
        finally:
            sidecar.resume()
            ending.set()
    calm, frozen = steps.in_windows(calm_s, freeze_s), steps.in_windows(freeze_s, resume_s)
    batches = at_resume["sequence"] - at_freeze["sequence"]
    print({"calm": calm, "frozen": frozen, "batches": batches})
    assert batches > 2 * SMALL_BUFFERS["buffer_steps"], batches
    assert min(frozen) > 0, frozen
    assert max(frozen) > max(calm) / 4, (calm, frozen)
    await pool.until_exact()
    await pool.until_views_equal_engines()
