"""A whole sidecar inside a test's event loop, and what it should have told its routers."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from kvrouting_core.blocks import ChainHasher, Namespace
from kvrouting_sidecar.engine_http import EngineTimes
from kvrouting_sidecar.grpc_channel import RouterCredentials
from kvrouting_sidecar.grpc_conversation import StreamTimes
from kvrouting_sidecar.rank_follower import FollowerTimes
from kvrouting_sidecar.router_names import RouterName
from kvrouting_sidecar.settings import DrainSettings, EndpointOverrides, Settings
from kvrouting_sidecar.sidecar import Sidecar
from tests.fakes.fake_engine import FakeEngine, FakeRank
from tests.fakes.fake_router import FakeRouter

HASH_KEY = b"a hash key of the tests' own pool"
BLOCK_SIZE = 16


async def eventually(condition: Callable[[], object], *, limit_s: float = 45.0) -> None:
    """Wait until it holds."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come to hold"
        await asyncio.sleep(0.01)


def expected_blocks(rank: FakeRank) -> set[int]:
    """The routing blocks of an engine's tree, by their definition: every full block of every cached path."""
    hasher = ChainHasher(HASH_KEY, BLOCK_SIZE)
    blocks: set[int] = set()
    parents = {page[0] for page in rank.pages.values()}
    for page_hash in rank.pages.keys() - parents:
        tokens: list[int] = []
        at: int | None = page_hash
        lora = salt = None
        while at is not None:
            at, page, lora, salt = rank.pages[at]
            tokens[:0] = page
        namespace = Namespace(model="fake-model", lora_adapter=lora, cache_salt=salt)
        blocks.update(hasher.hash_blocks(namespace, tokens).tolist())
    return blocks


class NameServer:
    """A resolver whose answers tests change. Each router listens on a port of its own, so each has its own name."""

    def __init__(self, routers: Sequence[FakeRouter]) -> None:
        self.names = [RouterName(host=f"router-{index}", port=router.port) for index, router in enumerate(routers)]
        self.addresses = {name: frozenset({"127.0.0.1"}) for name in self.names}

    async def resolve(self, name: RouterName) -> frozenset[str]:
        return self.addresses[name]


def settings_for(engine: FakeEngine, names: Sequence[RouterName], **changes: Any) -> Settings:
    """Settings with short intervals."""
    values: dict[str, Any] = {
        "pool": "pool-a",
        "pod_uid": "pod-1",
        "engine_url": engine.url,
        "advertise_endpoint": engine.url,
        "hash_key": HASH_KEY,
        "routers": tuple(names),
        "block_size_tokens": BLOCK_SIZE,
        "endpoints": EndpointOverrides(state=engine.state_endpoint if engine.has_state_socket else None),
        "look_up_every_s": 0.05,
        "engine_times": EngineTimes(healthy_s=0.1, away_s=0.02),
        "drain": DrainSettings(token="drain-token", limit_s=30.0),
        "credentials": RouterCredentials(),
        "stream_times": StreamTimes(flush_s=0.005, farewell_s=2.0),
        "follower_times": FollowerTimes(verify_s=0.1, answer_limit_s=1.5),
        "http_host": "127.0.0.1",
        "http_port": 0,
    }
    return Settings(**(values | changes))


@asynccontextmanager
async def running_sidecar(
    engine: FakeEngine, *routers: FakeRouter, name_server: NameServer | None = None, **changes: Any
) -> AsyncIterator[Sidecar]:
    """A sidecar between these; stopped in order at the end."""
    names = name_server or NameServer(routers)
    sidecar = Sidecar(
        settings_for(engine, names.names, **changes),
        resolver=names.resolve,
        clock_s=time.monotonic,
        rng=random.Random(1),
    )
    running = asyncio.create_task(sidecar.run())
    try:
        yield sidecar
    finally:
        sidecar.stop()
        async with asyncio.timeout(45):
            await running


async def in_step(engine: FakeEngine, *routers: FakeRouter, rank: int = 0) -> None:
    """Wait until the routers hold exactly what the engine's rank holds; no rule was broken on the way."""
    wanted = expected_blocks(engine.ranks[rank])
    await eventually(lambda: all(router.blocks(rank) == wanted for router in routers))
    for router in routers:
        assert [stream.violations for stream in router.streams if stream.violations] == []
