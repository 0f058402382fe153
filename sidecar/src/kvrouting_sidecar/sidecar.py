"""One sidecar put together: engine, ranks, streams, drain. Everything that changes with time belongs to `run`."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable

import aiohttp
import zmq.asyncio

from kvrouting_core.blocks import ChainHasher
from kvrouting_core.identity import WorkerIdentity
from kvrouting_sidecar.backoff import Backoff
from kvrouting_sidecar.drain import Drain
from kvrouting_sidecar.engine_endpoints import RankEndpoints, rank_endpoints
from kvrouting_sidecar.engine_http import EngineHttp
from kvrouting_sidecar.engine_info import EngineInfo
from kvrouting_sidecar.engine_sockets import EngineSockets
from kvrouting_sidecar.event_queue import EventQueue
from kvrouting_sidecar.event_reader import EventReader, Published
from kvrouting_sidecar.grpc_router_stream import RouterStream
from kvrouting_sidecar.mirror_terms import EventSource
from kvrouting_sidecar.rank import Listeners, Rank, WorkerFacts
from kvrouting_sidecar.rank_follower import RankFollower
from kvrouting_sidecar.rank_mirror import RankMirror
from kvrouting_sidecar.readiness import Check, readiness
from kvrouting_sidecar.router_names import Resolver, RouterAddress
from kvrouting_sidecar.router_streams import RouterStreams, Stream
from kvrouting_sidecar.settings import Settings

_log = logging.getLogger(__name__)


class Sidecar:
    """`run` until `stop`. Pages and metrics read it at any time."""

    def __init__(
        self, settings: Settings, *, resolver: Resolver, clock_s: Callable[[], float], rng: random.Random
    ) -> None:
        self.settings = settings
        self._clock_s = clock_s
        self._rng = rng
        self._stopping = asyncio.Event()
        self._standing_changed = asyncio.Event()
        self._hasher = ChainHasher(settings.hash_key, settings.block_size_tokens)
        self.engine: EngineHttp | None = None
        self.ranks: list[Rank] = []
        self.reader: EventReader | None = None
        self.streams = RouterStreams(
            settings.routers,
            resolver=resolver,
            open_streams=self._open_streams,
            look_up_every_s=settings.look_up_every_s,
        )
        self.drain = Drain(
            self.streams, limit_s=settings.drain.limit_s, clock_s=clock_s, changed=self._standing_changed
        )

    def stop(self) -> None:
        """Tell the routers and end."""
        self._stopping.set()

    def readiness(self) -> list[Check]:
        """What must hold before requests may come, and what of it does."""
        return readiness(
            engine_known=bool(self.ranks),
            engine_trouble=self.engine.trouble if self.engine else "",
            engine_healthy=self.engine is not None and self.engine.healthy,
            engine_url=self.settings.engine_url,
            ranks=self.ranks,
            streams=self.streams.statuses(),
            require_eviction=self.settings.require_eviction,
            draining=self.drain.announced,
        )

    async def run(self) -> None:
        """Serve one engine until `stop`."""
        with zmq.asyncio.Context() as sockets:
            async with aiohttp.ClientSession() as client:
                self.engine = EngineHttp(client, url=self.settings.engine_url, times=self.settings.engine_times)
                try:
                    await self._until_stopped(self.engine, sockets)
                finally:
                    if self.reader is not None:
                        await asyncio.to_thread(self.reader.stop)
            sockets.destroy(linger=0)

    async def _until_stopped(self, engine: EngineHttp, sockets: zmq.asyncio.Context) -> None:
        async with asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(self._serve(engine, sockets), name="serve")
            await self._stopping.wait()
            await self.streams.farewell()
            serving.cancel()

    async def _serve(self, engine: EngineHttp, sockets: zmq.asyncio.Context) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(engine.watch_health(), name="health")
            info = await self._found(engine)
            self.ranks = [self._build_rank(info, number, engine, sockets) for number in range(info.dp_size)]
            for rank in self.ranks:
                following = rank.follower.run() if rank.follower else self._follow_restarts(rank, engine)
                tasks.create_task(following, name=f"rank-{rank.facts.identity.dp_rank}")
            self._start_reader(tasks)
            tasks.create_task(self.streams.run(), name="routers")

    def _start_reader(self, tasks: asyncio.TaskGroup) -> None:
        published = [rank.published for rank in self.ranks if rank.published is not None]
        if not published:
            return
        ended, loop = asyncio.Event(), asyncio.get_running_loop()
        self.reader = EventReader(published, clock_s=self._clock_s, on_end=lambda: _call_in(loop, ended))
        self.reader.start()
        tasks.create_task(_fail_after(ended), name="reader")

    async def _found(self, engine: EngineHttp) -> EngineInfo:
        """The engine's description, asked for until it is there."""
        while True:
            info = await engine.describe()
            if info is not None:
                _log.info("engine found", extra={"model": info.model, "ranks": info.dp_size, "version": info.version})
                return info
            await asyncio.sleep(self.settings.engine_times.away_s)

    async def _follow_restarts(self, rank: Rank, engine: EngineHttp) -> None:
        """Of an engine without events: its description is all that tells a restart."""
        known: str | None = None
        while True:
            info = await engine.describe()
            if info is not None and (rank.mirror.epoch is None or info.start_fingerprint != known):
                known = info.start_fingerprint
                event_source = EventSource(epoch=None, fingerprint=known)
                rank.mirror.identified(event_source, fallback_epoch=known or self._new_epoch_name())
            await asyncio.sleep(engine.pause_s)

    def _build_rank(self, info: EngineInfo, number: int, engine: EngineHttp, sockets: zmq.asyncio.Context) -> Rank:
        settings, listeners = self.settings, Listeners()
        endpoints = rank_endpoints(info, settings.endpoints, host=settings.engine_host, rank=number)
        model = settings.model or info.model
        mirror = RankMirror(
            self._hasher,
            model=model,
            capacity_tokens=info.capacity_tokens,
            page_size_tokens=info.page_size_tokens,
            listener=listeners,
        )
        follower, published = self._build_follower(mirror, endpoints, engine, sockets)
        return Rank(
            facts=self._facts(model, number),
            engine=info,
            mirror=mirror,
            listeners=listeners,
            follower=follower,
            published=published,
            engine_is_healthy=lambda: engine.healthy,
            clock_s=self._clock_s,
        )

    def _facts(self, model: str, number: int) -> WorkerFacts:
        settings = self.settings
        return WorkerFacts(
            identity=WorkerIdentity(pool=settings.pool, pod_uid=settings.pod_uid, dp_rank=number),
            model=model,
            block_size_tokens=settings.block_size_tokens,
            hash_key_id=self._hasher.key_id,
            tokenizer_fingerprint=settings.tokenizer_fingerprint,
            gpu_class=settings.gpu_class,
            http_endpoint=settings.advertise_endpoint,
            required_eviction=settings.require_eviction or "",
        )

    def _build_follower(
        self, mirror: RankMirror, endpoints: RankEndpoints, engine: EngineHttp, sockets: zmq.asyncio.Context
    ) -> tuple[RankFollower | None, Published | None]:
        if endpoints.events is None:
            return None, None
        arrived, loop = asyncio.Event(), asyncio.get_running_loop()
        queue = EventQueue(
            limit_bytes=self.settings.queue_bytes,
            on_arrival=lambda: _call_in(loop, arrived),
        )
        published = Published(
            events_endpoint=endpoints.events,
            load_endpoint=endpoints.load,
            topic=endpoints.topic,
            queue=queue,
        )
        follower = RankFollower(
            mirror=mirror,
            published=published,
            arrived=arrived,
            sockets=EngineSockets(
                sockets,
                replay_endpoint=endpoints.replay,
                state_endpoint=endpoints.state,
                events_port=endpoints.events_port,
                answer_limit_s=self.settings.follower_times.answer_limit_s,
            ),
            describe_engine=engine.describe,
            new_epoch_name=self._new_epoch_name,
            backoff=self._backoff,
            clock_s=self._clock_s,
            times=self.settings.follower_times,
        )
        return follower, published

    def _open_streams(self, address: RouterAddress) -> list[Stream]:
        return [
            RouterStream(
                rank=rank,
                address=address,
                credentials=self.settings.credentials,
                # A router at its old address again is cold until the next attempt, so that must not be far.
                backoff=Backoff(self._rng, limit_s=1.0),
                clock_s=self._clock_s,
                times=self.settings.stream_times,
                standing_changed=self._standing_changed.set,
            )
            for rank in self.ranks
        ]

    def _backoff(self) -> Backoff:
        return Backoff(self._rng)

    def _new_epoch_name(self) -> str:
        return f"{self._rng.getrandbits(64):016x}"


async def _fail_after(reader_ended: asyncio.Event) -> None:
    """Raises: RuntimeError when the thread has ended: better no sidecar than one whose mirror stands still."""
    await reader_ended.wait()
    raise RuntimeError("the thread that reads the engine's events has ended")


def _call_in(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    """Set the event from another thread."""
    if not event.is_set():
        try:
            loop.call_soon_threadsafe(event.set)
        except RuntimeError:
            _log.debug("the loop has ended before the reading thread")
