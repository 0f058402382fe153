"""Servers of two ranks on the CPU: data-parallel ranks have a cache each, tensor-parallel ranks the same."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from tests.engine.real.servers import CACHE_TOKENS, MODEL_NAME, RealServer
from tests.engine.real.start_line import StartingServer
from tests.engine.real.whole_path import BLOCK_TOKENS, RealLoad, RealPool, eventually
from tests.engine_sockets import ask_state

pytestmark = [
    pytest.mark.timeout(1200),
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two ranks need two cores"),
]


@pytest.fixture(scope="module")
def tp(starting_tp: StartingServer) -> Iterator[RealServer]:
    yield starting_tp.ready()
    starting_tp.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def dp_pool(starting_dp: StartingServer, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RealPool]:
    server = await asyncio.to_thread(starting_dp.ready)
    async with RealPool({"dp": server}, folder=tmp_path_factory.mktemp("pool"), ranks=2) as pool:
        yield pool
    starting_dp.stop()


async def test_each_data_parallel_rank_has_its_own_cache_socket_and_events(dp_pool: RealPool) -> None:
    server = dp_pool.servers["dp"]
    states = [(await ask_state(server.ports.state + rank, "state", seconds=30))[0] for rank in (0, 1)]
    assert [state["dp_rank"] for state in states] == [0, 1]
    assert [state["events_port"] for state in states] == [server.ports.events, server.ports.events + 1]
    assert states[0]["epoch"] != states[1]["epoch"]
    assert [state["capacity_tokens"] for state in states] == [CACHE_TOKENS, CACHE_TOKENS]
    workers = await dp_pool.workers()
    assert {(view["dp_rank"], view["dp_size"], view["epoch"]) for view in workers.values()} == {
        (rank, 2, states[rank]["epoch"]) for rank in (0, 1)
    }


async def test_requests_are_pinned_to_the_rank_that_the_router_chose(dp_pool: RealPool) -> None:
    """What a rank was sent is found in its own tree and in no other, and what was matched there is cached there."""
    load = RealLoad(seed=31)
    prompts = [load.fresh_tokens(10 * BLOCK_TOKENS) for _ in range(10)]
    first = [await dp_pool.send(prompt) for prompt in prompts]
    assert {answer.status for answer in first} == {200}
    blocks = await dp_pool.until_views_equal_engines()
    sent_to = {rank: [a.prompt for a in first if a.worker == f"dp/{rank}"] for rank in (0, 1)}
    assert all(sent_to.values()), "the router used one rank alone"
    for rank, sent in sent_to.items():
        assert blocks[f"dp/{rank}"] >= len(sent) * 10, (blocks, len(sent))
    for answer in first:
        again = await dp_pool.send([*answer.prompt, *load.fresh_tokens(8)])
        assert again.worker == answer.worker
        assert again.matched_tokens == len(answer.prompt) <= again.cached_tokens


async def test_openai_requests_are_pinned_by_the_header(dp_pool: RealPool) -> None:
    load = RealLoad(seed=32)
    shared = load.fresh_tokens(6 * BLOCK_TOKENS)
    first = await dp_pool.send(shared)
    await dp_pool.until_views_equal_engines()
    body = {"model": MODEL_NAME, "prompt": [*shared, *load.fresh_tokens(8)], "max_tokens": 2}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{dp_pool.router_url}/v1/completions", json=body) as response,
    ):
        answered: dict[str, Any] = await response.json()
        assert response.status == 200, answered
        assert f'"worker":"{first.worker}"' in response.headers["x-kvrouting-decision"].replace(" ", "")
    assert answered["usage"]["prompt_tokens_details"]["cached_tokens"] >= len(shared)


async def test_tensor_parallel_ranks_hold_the_same_tree_after_many_evictions(tp: RealServer) -> None:
    load = RealLoad(seed=33)
    for _ in range(60):
        await asyncio.to_thread(tp.generate, load.prompt(), new_tokens=2)
    told: list[dict[str, Any]] = []

    async def alike() -> bool:
        nonlocal told
        told = [(await ask_state(tp.ports.witness + rank, "tree", seconds=30))[0] for rank in (0, 1)]
        return told[0] == told[1]

    await eventually(alike, what=lambda: told)
    assert told[0]["evicted_tokens"] > CACHE_TOKENS
    assert told[0]["phase"] > 1
    assert told[0]["tokens"] > CACHE_TOKENS / 2
