"""Bursts that share a new prefix, and router replicas that share workers."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from kvrouting_simulator.demo.pool_plan import PoolPlan
from tests.processes import LocalPool
from tests.recovery.pool_under_test import Load, views_equal_engines

pytestmark = pytest.mark.processes


async def test_siblings_of_one_new_prefix_are_prefilled_by_two_workers_at_most(tmp_path: Path) -> None:
    async with LocalPool(PoolPlan(engines=4, speed=4), folder=tmp_path) as pool:
        load = Load(pool, seed=1)
        prefix = load.fresh_tokens(8192)
        prompts = [prefix + load.fresh_tokens(32) for _ in range(64)]
        answers = await asyncio.gather(*(load.send(prompt) for prompt in prompts))
        assert {answer.status for answer in answers} == {200}
        prefilled = Counter(a.worker for a in answers if a.cached_tokens < len(prefix) / 2)
        assert 1 <= len(prefilled) <= 2, prefilled


async def test_two_routers_share_the_workers_evenly_and_a_new_one_is_warm_at_once(tmp_path: Path) -> None:
    plan = PoolPlan(engines=4, routers=2, capacity_tokens=20_000, speed=10)
    async with LocalPool(plan, folder=tmp_path) as pool:
        await pool.wait_live(range(4), timeout_s=30, router=1)
        load = Load(pool, seed=3, groups=40)

        async def through(router: int) -> None:
            for _ in range(100):
                await load.send(load.prompt(), router=router)

        async with asyncio.TaskGroup() as clients:
            for router in (0, 1):
                for _ in range(4):
                    clients.create_task(through(router))
        assert {answer.status for answer in load.answers} == {200}
        computed = Counter[str]()
        for answer in load.answers:
            computed[answer.worker] += len(answer.prompt) - answer.cached_tokens
        mean = sum(computed.values()) / 4
        assert max(computed.values()) <= 1.5 * mean, computed

        await pool.routers[1].kill()
        await pool.routers[1].start()
        await pool.routers[1].wait_for_event("listening", timeout_s=30)
        await pool.wait_live(range(4), timeout_s=60, router=1)
        # Who is live is known whole: nothing is served meanwhile from which a router could learn.
        await views_equal_engines(pool, router=1, timeout_s=1)
        await load.credited_rightly(router=1)
