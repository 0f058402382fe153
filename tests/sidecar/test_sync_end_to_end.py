"""From the engine's event socket to the routers' views, over real sockets."""

from __future__ import annotations

from tests.fakes.fake_engine import FakeEngine
from tests.fakes.fake_router import FakeRouter
from tests.fakes.running_sidecar import eventually, in_step, running_sidecar


async def test_routers_see_what_the_engine_stores_and_removes() -> None:
    async with FakeEngine(page_size=1) as engine, FakeRouter() as router, running_sidecar(engine, router):
        await eventually(lambda: router.blocks() is not None)
        rank = engine.ranks[0]
        rank.store(list(range(200)))
        await in_step(engine, router)
        assert len(router.blocks() or ()) == 12
        rank.store([*range(100), *range(500, 600)])
        await in_step(engine, router)
        rank.trim(list(range(200)), keep_pages=150)
        await in_step(engine, router)
        rank.clear()
        await in_step(engine, router)
        assert router.blocks() == set()


async def test_a_sidecar_tells_which_eviction_policy_its_worker_must_prove() -> None:
    async with FakeEngine() as engine, FakeRouter() as router, running_sidecar(engine, router, require_eviction="rlt"):
        await eventually(lambda: router.worker())
        worker = router.worker()
        assert worker is not None
        assert worker.hello.required_eviction_policy == "rlt"
    async with FakeEngine() as engine, FakeRouter() as router, running_sidecar(engine, router):
        await eventually(lambda: router.worker())
        worker = router.worker()
        assert worker is not None
        assert worker.hello.required_eviction_policy == ""
