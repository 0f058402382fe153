"""The follower between two engine processes: what the former left in the queue never reaches the mirror of the next."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncGenerator

from kvrouting_core.blocks import ChainHasher
from kvrouting_sidecar.backoff import Backoff
from kvrouting_sidecar.engine_info import EngineInfo
from kvrouting_sidecar.engine_sockets import EngineSilentError, EngineSockets
from kvrouting_sidecar.event_queue import EventQueue, ReceivedBatch
from kvrouting_sidecar.event_reader import Published
from kvrouting_sidecar.rank import Listeners
from kvrouting_sidecar.rank_follower import FollowerTimes, RankFollower
from kvrouting_sidecar.rank_mirror import RankMirror
from kvrouting_sidecar.wire_events import EngineState, SnapshotChunk
from tests.fakes.fake_engine import FakeEngine
from tests.fakes.running_sidecar import BLOCK_SIZE, HASH_KEY, eventually


class _Sockets(EngineSockets):
    """The state socket of an engine that a test replaces by another."""

    def __init__(self) -> None:
        self.epoch = "first"
        self.sequence = 0

    async def state(self) -> EngineState:
        return EngineState(epoch=self.epoch, sequence=self.sequence, pages=0, digest=0)

    async def snapshot(self) -> AsyncGenerator[SnapshotChunk, None]:
        yield SnapshotChunk(epoch=self.epoch, position=self.sequence, events=[], end=True)

    async def replay(self, first: int) -> AsyncGenerator[tuple[int, bytes], None]:
        raise EngineSilentError(f"nothing from {first} on")
        yield 0, b""


async def _no_description() -> EngineInfo | None:
    return None


def _batches(first: int, count: int) -> list[ReceivedBatch]:
    rank = FakeEngine().ranks[0]
    sent: list[ReceivedBatch] = []
    rank.send = lambda sequence, payload: sent.append(  # type: ignore[method-assign]
        ReceivedBatch(sequence=first + sequence, payload=payload)
    )
    for number in range(count):
        rank.store([number, *range(50)])
    return sent


async def test_batches_of_a_former_process_are_thrown_away() -> None:
    arrived = asyncio.Event()
    queue = EventQueue(limit_bytes=1 << 20, on_arrival=arrived.set)
    published = Published(events_endpoint="tcp://127.0.0.1:1", load_endpoint=None, topic="", queue=queue)
    sockets = _Sockets()
    mirror = RankMirror(
        ChainHasher(HASH_KEY, BLOCK_SIZE), model="m", capacity_tokens=0, page_size_tokens=1, listener=Listeners()
    )
    follower = RankFollower(
        mirror=mirror,
        published=published,
        arrived=arrived,
        sockets=sockets,
        describe_engine=_no_description,
        new_epoch_name=lambda: "unnamed",
        backoff=lambda: Backoff(random.Random(1)),
        clock_s=time.monotonic,
        times=FollowerTimes(verify_s=0.05),
    )

    def connect() -> None:
        published.connection += 1
        queue.new_connection(published.connection)
        published.connected = True
        queue.announce()

    following = asyncio.create_task(follower.run())
    try:
        connect()
        await eventually(lambda: published.wanted_connection == 2)
        connect()
        await eventually(lambda: mirror.in_sync)
        # The engine is replaced, and the thread has not noticed: old batches, whose numbers would fit, still come in.
        sockets.epoch, sockets.sequence = "second", 4
        await eventually(lambda: published.wanted_connection == 3)
        for batch in _batches(first=4, count=3):
            queue.put(batch)
        connect()
        await eventually(lambda: mirror.epoch == "second" and mirror.in_sync)
        await eventually(lambda: mirror.verification.held)
        assert mirror.blocks == 0
        assert mirror.next_sequence == 4
        for batch in _batches(first=4, count=1):
            queue.put(batch)
        sockets.sequence = 5
        await eventually(lambda: mirror.next_sequence == 5)
        assert mirror.blocks == 51 // BLOCK_SIZE
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
