"""After every kind of loss the router's view is again the engine's real cache, proven by the engine's own tree."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import pytest_asyncio

from kvrouting_simulator.demo.pool_plan import PoolPlan
from tests.engine_sockets import ask_state
from tests.processes import LocalPool
from tests.recovery.pool_under_test import Load, engine_blocks, flush, misbehave, views_equal_engines

pytestmark = [pytest.mark.processes, pytest.mark.asyncio(loop_scope="module")]

# Takes a heartbeat or a comparison, about 2 s; the rest is for machines with more processes than cores. A view that
# only the silence of its sidecar could repair (10 s, then a new stream) is late even there.
WITHIN_S = 15.0

Fault = Callable[[LocalPool], Awaitable[None]]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=[1, 16], ids=["page1", "page16"])
async def pool(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalPool]:
    """Two engines whose caches hold a part of what the load shares: evictions go on all the time."""
    plan = PoolPlan(
        engines=2,
        capacity_tokens=9000,
        page_size=request.param,
        speed=20,
        engine_options=("--allow-misbehave", "--kv-events-buffer", "50"),
    )
    async with LocalPool(plan, folder=tmp_path_factory.mktemp("pool")) as cluster:
        yield cluster


async def engine_killed(pool: LocalPool) -> None:
    await pool.kill_engine(0)
    await asyncio.sleep(0.3)
    await pool.restart_engine(0)
    await pool.wait_live([0, 1], timeout_s=30)


async def sidecar_killed(pool: LocalPool) -> None:
    await pool.sidecars[0].kill()
    await asyncio.sleep(0.3)
    await pool.sidecars[0].start()
    await pool.sidecars[0].wait_for_event("listening", timeout_s=30)
    await pool.wait_live([0, 1], timeout_s=30)


async def router_killed(pool: LocalPool) -> None:
    await pool.routers[0].kill()
    await pool.routers[0].start()
    await pool.routers[0].wait_for_event("listening", timeout_s=30)
    await pool.wait_live([0, 1], timeout_s=30)


async def sidecar_frozen(pool: LocalPool) -> None:
    """30 s, while the load goes on and the engine's replay buffer turns over many times."""
    pool.sidecars[0].freeze()
    await asyncio.sleep(30)
    pool.sidecars[0].resume()
    await pool.wait_live([0, 1], timeout_s=30)


async def for_a_while(pool: LocalPool) -> None:
    """Lets a fault of the first engine's events do its harm; afterwards they are in order, however few there were."""
    await asyncio.sleep(1.5)
    await misbehave(pool, 0, action="behave")


async def events_lost_beyond_replay(pool: LocalPool) -> None:
    await misbehave(pool, 0, action="drop_events", batches=20, replay=False)
    await for_a_while(pool)


async def events_lost(pool: LocalPool) -> None:
    await misbehave(pool, 0, action="drop_events", batches=20)
    await for_a_while(pool)


async def events_duplicated(pool: LocalPool) -> None:
    await misbehave(pool, 0, action="duplicate_events", batches=50)
    await for_a_while(pool)


async def engine_restarted_in_place(pool: LocalPool) -> None:
    await misbehave(pool, 0, action="restart")
    await asyncio.sleep(1.0)
    await pool.wait_live([0, 1], timeout_s=30)


FAULTS: list[Fault] = [
    engine_killed,
    sidecar_killed,
    router_killed,
    events_lost,
    events_lost_beyond_replay,
    events_duplicated,
    engine_restarted_in_place,
    pytest.param(sidecar_frozen, marks=pytest.mark.slow),  # type: ignore[list-item]
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
async def test_view_equals_the_engine_after(pool: LocalPool, fault: Fault) -> None:
    load = Load(pool, seed=hash_of(fault))
    ending = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(load.run(until=ending))
        await asyncio.sleep(1.0)
        await fault(pool)
        ending.set()
    await views_equal_engines(pool, timeout_s=WITHIN_S)
    await load.credited_rightly()
    # A router that has just started knows no worker yet, and says so at once.
    allowed = {200, 503} if fault is router_killed else {200}
    assert {answer.status for answer in load.answers} <= allowed


async def test_view_equals_the_engine_after_a_flush(pool: LocalPool) -> None:
    load = Load(pool, seed=77)
    await load.run(requests=30)
    assert await engine_blocks(pool, 0)
    await flush(pool, 0)
    assert not await engine_blocks(pool, 0)
    await views_equal_engines(pool, timeout_s=WITHIN_S)
    await load.credited_rightly()


async def test_evictions_went_on_all_the_time(pool: LocalPool) -> None:
    """Or the tests above would have shown little."""
    load = Load(pool, seed=78)
    await load.run(requests=120)
    for ports in pool.engine_ports:
        state = (await ask_state(ports.state, "state"))[0]
        assert state["eviction"]["policy"] == pool.plan.eviction
        assert state["eviction"]["evicted_tokens"] > 0


def hash_of(fault: Fault) -> int:
    """A seed of its own for each fault, the same in every process."""
    return sum(fault.__name__.encode())
