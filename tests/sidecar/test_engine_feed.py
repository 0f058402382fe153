"""The mirror follows one engine through everything that an event stream does, over real sockets."""

from __future__ import annotations

import asyncio
import random

import pytest

from kvrouting_sidecar.mirror_terms import Source
from kvrouting_sidecar.settings import EndpointOverrides
from tests.fakes.fake_engine import FakeEngine
from tests.fakes.fake_router import FakeRouter
from tests.fakes.running_sidecar import eventually, expected_blocks, in_step, running_sidecar


def _prompt(seed: int, length: int = 200) -> list[int]:
    return random.Random(seed).choices(range(1000), k=length)


@pytest.mark.parametrize("page_size", [1, 4, 16, 48, 64])
async def test_any_page_size_gives_the_same_routing_blocks(page_size: int) -> None:
    async with FakeEngine(page_size=page_size) as engine, FakeRouter() as router, running_sidecar(engine, router):
        await eventually(lambda: router.blocks() is not None)
        rank = engine.ranks[0]
        for seed in range(5):
            rank.store(_prompt(seed))
            rank.store(_prompt(seed)[:96] + _prompt(seed + 50))
        rank.trim(_prompt(0), keep_pages=1)
        await in_step(engine, router)
        assert router.blocks()


async def test_a_late_start_takes_a_snapshot() -> None:
    async with FakeEngine(replay_batches=1) as engine, FakeRouter() as router:
        for seed in range(20):
            engine.ranks[0].store(_prompt(seed))
        async with running_sidecar(engine, router) as sidecar:
            await in_step(engine, router)
            worker = router.worker()
            assert worker is not None
            await eventually(lambda: worker.heartbeats and worker.heartbeats[-1].end_to_end_verified)
            assert sidecar.ranks[0].mirror.counts.snapshots == 1


async def test_the_state_socket_of_another_engine_is_of_no_use() -> None:
    async with FakeEngine() as other, FakeEngine() as engine, FakeRouter() as router:
        other.ranks[0].store(_prompt(1))
        endpoints = EndpointOverrides(state=other.state_endpoint)
        async with running_sidecar(engine, router, endpoints=endpoints, require_eviction="rlt") as sidecar:
            engine.ranks[0].store(_prompt(2))
            await eventually(lambda: router.blocks() == expected_blocks(engine.ranks[0]))
            mirror = sidecar.ranks[0].mirror
            await eventually(lambda: "--state-endpoint" in mirror.reason())
            assert mirror.source is Source.PARTIAL
            assert str(other.ports[0]) in mirror.reason()
            checks = {check.name: check.reason for check in sidecar.readiness()}
            assert "that of another engine" in checks["eviction_policy_live"]


async def test_a_snapshot_may_be_fuzzy() -> None:
    async with FakeEngine() as engine, FakeRouter() as router:
        rank = engine.ranks[0]
        for seed in range(20):
            rank.store(_prompt(seed))
        rank.between_chunks = [
            lambda: rank.trim(_prompt(3), keep_pages=20),
            lambda: rank.store(_prompt(40)),
            lambda: rank.trim(_prompt(19), keep_pages=0),
            lambda: rank.store(_prompt(19)),
            lambda: rank.store(_prompt(3)),
        ]
        async with running_sidecar(engine, router) as sidecar:
            await eventually(lambda: not rank.between_chunks)
            await in_step(engine, router)
            await eventually(lambda: sidecar.ranks[0].mirror.verification.held)
            assert sidecar.ranks[0].mirror.verification.mismatches == 0


async def test_missing_batches_are_replayed() -> None:
    async with FakeEngine() as engine, FakeRouter() as router, running_sidecar(engine, router) as sidecar:
        await eventually(lambda: router.blocks() is not None)
        rank = engine.ranks[0]
        rank.lose(3)
        for seed in range(5):
            rank.store(_prompt(seed))
        await in_step(engine, router)
        counts = sidecar.ranks[0].mirror.counts
        assert counts.gaps >= 1
        assert counts.replayed_batches >= 3
        assert counts.snapshots == 1


async def test_a_loss_that_nothing_follows_is_noticed_by_the_comparison() -> None:
    async with FakeEngine() as engine, FakeRouter() as router, running_sidecar(engine, router) as sidecar:
        await eventually(lambda: router.blocks() is not None)
        engine.ranks[0].lose(1)
        engine.ranks[0].store(_prompt(1))
        await in_step(engine, router)
        assert sidecar.ranks[0].mirror.counts.snapshots == 1


async def test_a_gap_beyond_the_replay_is_closed_by_a_snapshot() -> None:
    async with (
        FakeEngine(replay_batches=2) as engine,
        FakeRouter() as router,
        running_sidecar(engine, router) as sidecar,
    ):
        await eventually(lambda: router.blocks() is not None)
        rank = engine.ranks[0]
        rank.lose(8)
        for seed in range(9):
            rank.store(_prompt(seed))
        await in_step(engine, router)
        assert sidecar.ranks[0].mirror.counts.snapshots == 2
        assert len({stream.hello.epoch for stream in router.streams}) == 1
        assert len(router.streams) == 1


@pytest.mark.parametrize("state_socket", [True, False])
async def test_duplicate_and_reordered_batches_bring_nothing_false(*, state_socket: bool) -> None:
    """Without a state socket a batch that comes again may be a restart: what was claimed is given up."""
    async with (
        FakeEngine(state_socket=state_socket) as engine,
        FakeRouter() as router,
        running_sidecar(engine, router) as sidecar,
    ):
        await eventually(lambda: sidecar.ranks and not sidecar.ranks[0].why_events_do_not_flow())
        rank = engine.ranks[0]
        for seed in range(6):
            rank.swap_next = seed in (1, 3)
            rank.store(_prompt(seed))
            rank.send(*rank.replayable[-1])
        rank.trim(_prompt(2), keep_pages=7)
        rank.send(*rank.replayable[0])
        if state_socket:
            await in_step(engine, router)
        else:
            await eventually(lambda: sidecar.ranks[0].mirror.need is None and len(router.streams) == 1)
            await eventually(lambda: (router.blocks(0) or set()) <= expected_blocks(rank))
        assert sidecar.ranks[0].mirror.counts.restarts == 0
        assert len(router.streams) == 1


@pytest.mark.parametrize("state_socket", [True, False])
async def test_a_restarted_engine_is_a_new_epoch_with_an_empty_cache(*, state_socket: bool) -> None:
    async with (
        FakeEngine(state_socket=state_socket) as engine,
        FakeRouter() as router,
        running_sidecar(engine, router) as sidecar,
    ):
        await eventually(lambda: sidecar.ranks and not sidecar.ranks[0].why_events_do_not_flow())
        engine.ranks[0].store(_prompt(1))
        await in_step(engine, router)
        await engine.restart()
        await eventually(lambda: len({stream.hello.epoch for stream in router.streams}) == 2)
        await eventually(lambda: router.blocks() == set())
        await eventually(lambda: sidecar.ranks[0].published and sidecar.ranks[0].published.connected)
        engine.ranks[0].store(_prompt(2))
        await in_step(engine, router)
        assert router.blocks() == expected_blocks(engine.ranks[0]) != set()
        assert sidecar.ranks[0].mirror.counts.restarts == 1


async def test_a_restart_that_overtakes_the_old_numbers_is_no_continuation() -> None:
    async with FakeEngine() as engine, FakeRouter() as router, running_sidecar(engine, router):
        await eventually(lambda: router.blocks() is not None)
        engine.ranks[0].store(_prompt(1))
        await in_step(engine, router)
        await engine.restart()
        for seed in range(10, 15):
            engine.ranks[0].store(_prompt(seed))
        await in_step(engine, router)


async def test_a_page_that_vanishes_without_event_is_found_by_the_digest() -> None:
    async with FakeEngine() as engine, FakeRouter() as router, running_sidecar(engine, router) as sidecar:
        await eventually(lambda: router.blocks() is not None)
        rank = engine.ranks[0]
        rank.store(_prompt(1))
        await in_step(engine, router)
        _, last_page = rank.path(_prompt(1))[-1]
        for _, page in rank.path(_prompt(1))[-40:]:
            del rank.pages[page]
        assert last_page not in rank.pages
        await in_step(engine, router)
        verification = sidecar.ranks[0].mirror.verification
        assert verification.mismatches == 1
        await eventually(lambda: verification.held)
        assert sidecar.ranks[0].mirror.counts.snapshots == 2


async def test_a_lost_state_socket_makes_the_mirror_partial_and_its_return_exact() -> None:
    async with FakeEngine() as engine, FakeRouter() as router, running_sidecar(engine, router):
        await eventually(lambda: router.blocks() is not None)
        rank, worker = engine.ranks[0], router.worker()
        assert worker is not None
        rank.store(_prompt(1))
        await in_step(engine, router)
        await eventually(lambda: worker.heartbeats[-1].mirror_source == 1)
        rank.state_silent = True
        await eventually(lambda: worker.heartbeats[-1].mirror_source == 2)
        assert "state socket" in worker.heartbeats[-1].reason
        assert not worker.heartbeats[-1].end_to_end_verified
        rank.store(_prompt(2))
        await in_step(engine, router)
        rank.state_silent = False
        await eventually(lambda: worker.heartbeats[-1].end_to_end_verified)
        assert worker.heartbeats[-1].mirror_source == 1
        assert worker.heartbeats[-1].reason == ""
        assert len(router.streams) == 1


async def test_without_a_state_socket_a_gap_beyond_the_replay_empties_the_mirror() -> None:
    async with (
        FakeEngine(state_socket=False, replay_batches=1) as engine,
        FakeRouter() as router,
        running_sidecar(engine, router) as sidecar,
    ):
        await eventually(lambda: sidecar.ranks and not sidecar.ranks[0].why_events_do_not_flow())
        rank = engine.ranks[0]
        rank.store(_prompt(1))
        await in_step(engine, router)
        rank.lose(2)
        rank.trim(_prompt(1), keep_pages=30)
        rank.store(_prompt(2))
        rank.store(_prompt(3))
        only_the_last = set(router.blocks() or ())
        await eventually(lambda: router.blocks() not in (None, only_the_last))
        await eventually(lambda: len(router.blocks() or ()) == 200 // 16)
        assert (router.blocks() or set()) < expected_blocks(rank)
        worker = router.worker()
        assert worker is not None
        assert worker.heartbeats[-1].mirror_source == 2


async def test_a_stock_engine_is_caught_up_from_its_replay_buffer() -> None:
    async with FakeEngine(state_socket=False) as engine, FakeRouter() as router:
        for seed in range(5):
            engine.ranks[0].store(_prompt(seed))
        async with running_sidecar(engine, router):
            await in_step(engine, router)


async def test_each_rank_is_a_worker_of_its_own() -> None:
    async with FakeEngine(dp_size=3) as engine, FakeRouter() as router, running_sidecar(engine, router):
        await eventually(lambda: all(router.blocks(number) is not None for number in range(3)))
        for number, rank in enumerate(engine.ranks):
            rank.store(_prompt(number))
        for number in range(3):
            await in_step(engine, router, rank=number)
        assert len({frozenset(router.blocks(number) or ()) for number in range(3)}) == 3
        assert {stream.hello.dp_size for stream in router.streams} == {3}


async def test_adapters_and_salts_are_never_mixed() -> None:
    async with FakeEngine() as engine, FakeRouter() as router, running_sidecar(engine, router):
        await eventually(lambda: router.blocks() is not None)
        rank = engine.ranks[0]
        rank.store(_prompt(1))
        rank.store(_prompt(1), lora="sql")
        rank.store(_prompt(1), salt="tenant-7")
        await in_step(engine, router)
        assert len(router.blocks() or ()) == 3 * (200 // 16)


async def test_an_engine_without_events_is_approximate() -> None:
    async with (
        FakeEngine(events=False, state_socket=False) as engine,
        FakeRouter() as router,
        running_sidecar(engine, router) as sidecar,
    ):
        await eventually(lambda: router.worker() and router.worker().heartbeats)  # type: ignore[union-attr]
        worker = router.worker()
        assert worker is not None
        assert worker.heartbeats[-1].mirror_source == 3
        assert "KV events" in worker.heartbeats[-1].reason
        first_epoch = worker.hello.epoch
        engine.starts += 1
        await eventually(lambda: router.worker() and router.worker().hello.epoch != first_epoch)  # type: ignore[union-attr]
        events = next(check for check in sidecar.readiness() if check.name == "events_flowing")
        assert not events.holds


async def test_load_reaches_the_routers_with_its_age() -> None:
    async with FakeEngine() as engine, FakeRouter() as router, running_sidecar(engine, router):
        await eventually(lambda: router.blocks() is not None)
        worker = router.worker()
        assert worker is not None
        assert not worker.heartbeats[-1].HasField("load") if worker.heartbeats else True

        async def report() -> None:
            while not (worker.heartbeats and worker.heartbeats[-1].HasField("load")):
                engine.ranks[0].report_load(running=3, waiting=2, tokens=500, total_prefill_busy_us=77)
                await asyncio.sleep(0.05)

        async with asyncio.timeout(30):
            await report()
        load = worker.heartbeats[-1].load
        assert (load.running_requests, load.waiting_requests, load.used_tokens) == (3, 2, 500)
        assert load.total_prefill_busy_us == 77
        count = len(worker.heartbeats)
        await eventually(lambda: len(worker.heartbeats) >= count + 4)
        assert worker.heartbeats[-1].load.age_s > load.age_s


async def test_hello_says_what_the_engine_is() -> None:
    async with FakeEngine(page_size=4) as engine, FakeRouter() as router:
        async with running_sidecar(engine, router, gpu_class="L40S", tokenizer_fingerprint="abc"):
            await eventually(lambda: router.worker() is not None)
        hello = router.streams[0].hello
        assert (hello.pool, hello.pod_uid, hello.dp_rank) == ("pool-a", "pod-1", 0)
        assert (hello.model, hello.engine_version) == ("fake-model", "0.5.23")
        assert (hello.block_size_tokens, hello.page_size_tokens) == (16, 4)
        assert (hello.gpu_class, hello.tokenizer_fingerprint) == ("L40S", "abc")
        assert hello.capacity_tokens == 100_000
        assert hello.eviction_policy.name == "rlt"
        assert hello.eviction_policy.proven_live
        assert hello.scheduler.max_running_requests == 64
        assert hello.http_endpoint == engine.url
        assert len(hello.hash_key_id) == 16
