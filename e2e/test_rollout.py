"""A change rolls the workers under load."""

from __future__ import annotations

import asyncio

from e2e.pool import Pool
from e2e.streams import steady_load


async def test_new_engine_arguments_roll_out_without_a_failed_request(pair: Pool) -> None:
    pool = pair
    before, routers = pool.pod_names("worker"), pool.pod_names("router")

    with pool.router() as url:
        async with steady_load(url, clients=4, max_tokens=48) as load:
            await asyncio.to_thread(pool.patch, {"engine": {"args": ["--own-answer-tokens=64"]}})
            await asyncio.to_thread(pool.wait_for_condition, "Progressing", "True", patience_s=30)
            await asyncio.to_thread(pool.wait_until_good, workers=2)

    assert load.faults == []
    assert load.answered > 0
    assert not before & pool.pod_names("worker")
    assert pool.pod_names("router") == routers
