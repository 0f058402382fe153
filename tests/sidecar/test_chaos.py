"""Everything at once: whatever went wrong, the end is the engine's tree in every router."""

from __future__ import annotations

import asyncio
import random

import pytest

from tests.fakes.fake_engine import FakeEngine, FakeRank
from tests.fakes.fake_router import FakeRouter
from tests.fakes.running_sidecar import eventually, in_step, running_sidecar

_PROMPTS = [random.Random(seed % 5).choices(range(500), k=60) + [seed] * (seed * 7) for seed in range(30)]


def _disturb(rank: FakeRank, rng: random.Random) -> None:
    """One thing that happens to an engine, or to what it sends."""
    prompt = rng.choice(_PROMPTS)
    match rng.randrange(12):
        case 0:
            rank.lose(rng.randint(1, 5))
        case 1:
            rank.swap_next = True
        case 2 if rank.replayable:
            rank.send(*rng.choice(rank.replayable))
        case 3:
            rank.replayable.clear()
        case 4:
            rank.clear()
        case 5 | 6 | 7:
            rank.trim(prompt, keep_pages=rng.randrange(60))
        case _:
            rank.store(prompt, lora=rng.choice([None, None, "sql"]))


async def _trouble(engine: FakeEngine, router: FakeRouter, rng: random.Random) -> None:
    """Something worse, now and then."""
    match rng.randrange(60):
        case 0:
            await engine.restart()
        case 1:
            await router.stop()
            await router.start()
        case 2:
            router.acknowledges = False
        case 3 if router.blocks() is not None:
            router.ask_snapshot()
        case 4:
            engine.ranks[0].state_silent = not engine.ranks[0].state_silent


@pytest.mark.parametrize("seed", range(4))
async def test_whatever_happens_all_views_are_exact_in_the_end(seed: int) -> None:
    rng = random.Random(seed)
    async with (
        FakeEngine(replay_batches=20, page_size=4) as engine,
        FakeRouter(window=2) as router,
        FakeRouter() as other,
        running_sidecar(engine, router, other) as sidecar,
    ):
        await eventually(lambda: router.blocks() is not None and other.blocks() is not None)
        for _ in range(300):
            _disturb(engine.ranks[0], rng)
            await _trouble(engine, router, rng)
            await asyncio.sleep(rng.choice([0, 0, 0.01]))
        engine.ranks[0].state_silent = False
        engine.ranks[0].lose(0)
        router.acknowledge_all()
        await eventually(lambda: sidecar.ranks[0].mirror.verification.held)
        await in_step(engine, router, other)
        verification = sidecar.ranks[0].mirror.verification
        await eventually(lambda: verification.held and sidecar.ranks[0].mirror.reason() == "")
        assert verification.mismatches == 0
