"""A real server of two tensor-parallel ranks that evicts by rlt-adaptive."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.real.rank_witness import BACKEND, BASE_PORT
from tests.engine.real.servers import CACHE_TOKENS, TWO_RANKS_ON_A_CPU, RealServer, free_ports
from tests.engine.real.test_ranks import witness_on_path
from tests.engine.real.test_servers import ask

pytestmark = [
    pytest.mark.timeout(1200),
    pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two ranks need two cores"),
]


@pytest.fixture(scope="module")
def witness_port() -> int:
    return free_ports().state


@pytest.fixture(scope="module")
def server(model: Path, witness_port: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    started = RealServer(
        model,
        log=tmp_path_factory.mktemp("adaptive") / "log",
        rlt=False,
        flags=("--tp-size", "2", "--random-seed", "11", "--radix-cache-backend", BACKEND),
        environment={
            **TWO_RANKS_ON_A_CPU,
            BASE_PORT: str(witness_port),
            "KVROUTING_ENGINE_POLICY": "rlt-adaptive",
            "PYTHONPATH": witness_on_path(tmp_path_factory.mktemp("witness")),
        },
    )
    try:
        yield started.wait_until_ready()
    finally:
        started.stop()


def test_a_cycle_hits_ranks_evict_alike_and_the_guarantee_is_told(server: RealServer, witness_port: int) -> None:
    rng = random.Random(1)
    prompts = [[rng.randrange(5, 512) for _ in range(240)] for _ in range(10)]
    asked = cached = 0
    for _ in range(8):
        for prompt in prompts:
            tokens, hit = server.generate(prompt)
            asked, cached = asked + tokens, cached + hit
    assert cached / asked >= 0.3

    (state,) = ask(server, "state")
    eviction = state["eviction"]
    assert (eviction["policy"], eviction["live"], eviction["seed"]) == ("rlt-adaptive", True, 11)
    assert eviction["evicted_tokens"] > 2 * CACHE_TOKENS
    assert eviction["phi_tokens"] <= eviction["phi_bound_tokens"]
    assert 0 < eviction["own_loaded_tokens"] <= 1.02 * eviction["ghost_loaded_tokens"] + eviction["phi_bound_tokens"]

    told = _trees(server, witness_port)
    assert told[0] == told[1]
    assert told[0]["evicted_tokens"] == eviction["evicted_tokens"]
    assert told[0]["own_loaded_tokens"] == eviction["own_loaded_tokens"]


def _trees(server: RealServer, witness_port: int) -> list[dict[str, Any]]:
    """What the ranks say, once they agree or have had half a minute: the second one may be a step behind."""
    limit = time.monotonic() + 30
    while True:
        told = [ask(server, "tree", port=witness_port + rank)[0] for rank in (0, 1)]
        if told[0] == told[1] or time.monotonic() > limit:
            return told
        time.sleep(0.5)
