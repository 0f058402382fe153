"""Servers of two ranks on the CPU: data-parallel ranks have a cache each, tensor-parallel ranks the same."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from tests.engine.real.rank_witness import BACKEND, BASE_PORT
from tests.engine.real.servers import CACHE_TOKENS, MODEL_NAME, TWO_RANKS_ON_A_CPU, RealServer, free_ports
from tests.engine.real.whole_path import BLOCK_TOKENS, RealLoad, RealPool, eventually
from tests.engine_sockets import ask_state

ROOT = Path(__file__).parents[3]
pytestmark = [
    pytest.mark.timeout(1200),
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two ranks need two cores"),
]


def witness_on_path(folder: Path) -> str:
    """A folder that, on PYTHONPATH, makes the witness an installed plug-in of SGLang."""
    metadata = folder / "rank_witness-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: rank-witness\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(
        "[sglang.srt.plugins]\nwitness = tests.engine.real.rank_witness:register\n"
    )
    return f"{folder}{os.pathsep}{ROOT}"


@pytest.fixture(scope="module")
def witness_port() -> int:
    return free_ports().state


@pytest.fixture(scope="module")
def two_ranks(
    model: Path, witness_port: int, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, RealServer]]:
    """`dp`: two data-parallel ranks. `tp`: two tensor-parallel ranks, each with the witness."""
    folder = tmp_path_factory.mktemp("ranks")
    started = {
        "dp": RealServer(
            model, log=folder / "dp", flags=("--dp-size", "2", "--random-seed", "11"), environment=TWO_RANKS_ON_A_CPU
        ),
        "tp": RealServer(
            model,
            log=folder / "tp",
            rlt=False,
            flags=("--tp-size", "2", "--random-seed", "11", "--radix-cache-backend", BACKEND),
            environment={
                **TWO_RANKS_ON_A_CPU,
                BASE_PORT: str(witness_port),
                "PYTHONPATH": witness_on_path(tmp_path_factory.mktemp("witness")),
            },
        ),
    }
    try:
        for server in started.values():
            server.wait_until_ready()
        yield started
    finally:
        for server in started.values():
            server.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def dp_pool(
    two_ranks: dict[str, RealServer], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[RealPool]:
    async with RealPool({"dp": two_ranks["dp"]}, folder=tmp_path_factory.mktemp("pool"), ranks=2) as pool:
        yield pool


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


async def test_tensor_parallel_ranks_hold_the_same_tree_after_many_evictions(
    two_ranks: dict[str, RealServer], witness_port: int
) -> None:
    server, load = two_ranks["tp"], RealLoad(seed=33)
    for _ in range(60):
        await asyncio.to_thread(server.generate, load.prompt(), new_tokens=2)
    told: list[dict[str, Any]] = []

    async def alike() -> bool:
        nonlocal told
        told = [(await ask_state(witness_port + rank, "tree", seconds=30))[0] for rank in (0, 1)]
        return told[0] == told[1]

    await eventually(alike, what=lambda: told)
    assert told[0]["evicted_tokens"] > CACHE_TOKENS
    assert told[0]["phase"] > 1
    assert told[0]["tokens"] > CACHE_TOKENS / 2
