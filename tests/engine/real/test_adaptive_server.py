"""A real server of two tensor-parallel ranks that is told no policy and evicts by rlt-adaptive."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.engine.real.servers import CACHE_TOKENS, RealServer
from tests.engine.real.start_line import StartingServer
from tests.engine.real.test_servers import ask

pytestmark = [
    pytest.mark.timeout(1200),
    pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two ranks need two cores"),
]


@pytest.fixture(scope="module")
def server(starting_adaptive: StartingServer) -> Iterator[RealServer]:
    yield starting_adaptive.ready()
    starting_adaptive.stop()


def test_a_cycle_hits_ranks_evict_alike_and_the_guarantee_is_told(server: RealServer) -> None:
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

    told = _trees(server)
    assert told[0] == told[1]
    assert told[0]["evicted_tokens"] == eviction["evicted_tokens"]
    assert told[0]["own_loaded_tokens"] == eviction["own_loaded_tokens"]


def _trees(server: RealServer) -> list[dict[str, Any]]:
    """What the ranks say, once they agree or have had half a minute: the second one may be a step behind."""
    limit = time.monotonic() + 30
    while True:
        told = [ask(server, "tree", port=server.ports.witness + rank)[0] for rank in (0, 1)]
        if told[0] == told[1] or time.monotonic() > limit:
            return told
        time.sleep(0.5)
