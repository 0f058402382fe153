"""An engine without the state socket: the router's view is a subset of the real cache, always."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from kvrouting_core.blocks import ChainHasher, Namespace
from kvrouting_simulator.demo.pool_plan import MODEL, PoolPlan, worker_id
from tests.processes import LocalPool
from tests.recovery.pool_under_test import BLOCK_TOKENS, Load, misbehave

pytestmark = [pytest.mark.processes, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalPool]:
    """One engine that publishes events and nothing more."""
    plan = PoolPlan(
        engines=1,
        capacity_tokens=9000,
        speed=20,
        engine_options=("--allow-misbehave", "--kv-events-buffer", "5", "--no-state"),
    )
    async with LocalPool(plan, folder=tmp_path_factory.mktemp("pool")) as cluster:
        yield cluster


async def lost_beyond_replay(pool: LocalPool) -> None:
    await misbehave(pool, 0, action="drop_events", batches=10, replay=False)


async def duplicated(pool: LocalPool) -> None:
    await misbehave(pool, 0, action="duplicate_events", batches=10)


async def killed(pool: LocalPool) -> None:
    await pool.kill_engine(0)
    await pool.restart_engine(0)
    await pool.wait_live([0], timeout_s=30)


@pytest.mark.parametrize("fault", [None, duplicated, lost_beyond_replay, killed])
async def test_nothing_is_claimed_that_is_not_there(pool: LocalPool, fault: object) -> None:
    load = Load(pool, seed=5)
    await load.run(requests=40)
    if callable(fault):
        await fault(pool)
        await load.run(requests=20)
    await asyncio.sleep(1.5)
    assert (await pool.workers())[worker_id(0)]["mirror"] == "partial"
    for _ in range(10):
        answer = await load.send(load.prompt())
        assert answer.matched_tokens <= answer.cached_tokens
        await asyncio.sleep(0.5)


async def test_what_is_seen_is_claimed(pool: LocalPool) -> None:
    """A subset, but not an idle one: what was stored since the last doubt counts."""
    load = Load(pool, seed=6)
    prompt = load.prompt()
    await load.send(prompt)
    hasher = ChainHasher(pool.hash_key, BLOCK_TOKENS)
    whole_blocks = len(hasher.hash_blocks(Namespace(model=MODEL, lora_adapter=None, cache_salt=None), prompt))
    for _ in range(300):
        await asyncio.sleep(0.1)
        answer = await load.send(prompt)
        if answer.matched_tokens == whole_blocks * BLOCK_TOKENS:
            return
    raise AssertionError(f"{answer.matched_tokens=} of {len(prompt)} tokens sent before")
