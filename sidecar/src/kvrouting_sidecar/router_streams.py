"""The streams to all routers that the names stand for at the moment: one for each rank and address."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvrouting_sidecar.drain import DrainStanding
from kvrouting_sidecar.router_names import ResolutionError, Resolver, RouterAddress, RouterName

_log = logging.getLogger(__name__)

# A router that is not there may have been replaced by one at another address, which is cold until it is found.
_LOOK_UP_WHILE_LOST_S = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamStatus:
    """One stream, for metrics and pages.

    last_error: why it ended last; empty while the router welcomes it. refusal: the same, where the router itself said
    no to this worker (token, pool, hash key, superseded ...); empty if it did not.
    """

    router: str
    rank: int
    connected: bool
    unacknowledged_messages: int
    pending_blocks: int
    lag_s: float
    sent_messages: int
    sent_snapshots: int
    connects: int
    last_error: str
    refusal: str


class Stream(Protocol):
    """One rank's stream to one router."""

    async def run(self) -> None:
        """Keep it open until cancelled."""

    async def farewell(self) -> None:
        """End it in order."""

    def status(self) -> StreamStatus:
        """As of now."""
        ...

    def announce_drain(self, number: int, reason: str) -> None:
        """Tell the router."""

    def standing(self, announcement: int) -> DrainStanding | None:
        """None: the router never welcomed the worker."""


@dataclass(slots=True)
class _Open:
    streams: list[Stream]
    tasks: list[asyncio.Task[None]]


class RouterStreams:
    """Follows the names; `run` until cancelled."""

    def __init__(
        self,
        names: Sequence[RouterName],
        *,
        resolver: Resolver,
        open_streams: Callable[[RouterAddress], list[Stream]],
        look_up_every_s: float,
    ) -> None:
        """open_streams: one stream for each rank to that address, not running yet."""
        if look_up_every_s <= 0:
            raise ValueError(f"look-up interval {look_up_every_s} s must be above 0")
        self._names = names
        self._resolver = resolver
        self._open_streams = open_streams
        self._look_up_every_s = look_up_every_s
        self._found: dict[RouterName, frozenset[RouterAddress]] = {}
        self._open: dict[RouterAddress, _Open] = {}
        self._announcement: tuple[int, str] | None = None

    async def run(self) -> None:
        """Look the names up again and again; open and close streams."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                for name in self._names:
                    await self._look_up(name)
                self._follow(tasks)
                await self._pause()

    async def _pause(self) -> None:
        """Until the next look-up: sooner while there is no router, or one of them has no stream."""
        left_s = self._look_up_every_s
        while left_s > 0:
            step_s = min(left_s, _LOOK_UP_WHILE_LOST_S)
            await asyncio.sleep(step_s)
            left_s -= step_s
            statuses = self.statuses()
            if not statuses or not all(status.connected for status in statuses):
                return

    def statuses(self) -> list[StreamStatus]:
        """All streams."""
        return [stream.status() for stream in self._streams()]

    def announce_drain(self, announcement: int, reason: str) -> None:
        """To all routers, also those that come later."""
        self._announcement = (announcement, reason)
        for stream in self._streams():
            stream.announce_drain(announcement, reason)

    def standings(self, announcement: int) -> Iterable[DrainStanding]:
        """Of routers that have ever welcomed the worker and are still behind the names."""
        standings = (stream.standing(announcement) for stream in self._streams())
        return [standing for standing in standings if standing is not None]

    async def farewell(self) -> None:
        """End all streams in order, at once."""
        async with asyncio.TaskGroup() as tasks:
            for stream in self._streams():
                tasks.create_task(stream.farewell())

    def _streams(self) -> list[Stream]:
        return [stream for opened in self._open.values() for stream in opened.streams]

    async def _look_up(self, name: RouterName) -> None:
        try:
            hosts = await self._resolver(name)
        except ResolutionError as error:
            # The name server's trouble is no router's: the streams tell themselves whether they are alive.
            _log.warning("a router's name cannot be looked up", extra={"error": str(error)})
            return
        self._found[name] = frozenset(RouterAddress(host, name.port, name.host) for host in hosts)

    def _follow(self, tasks: asyncio.TaskGroup) -> None:
        # Two names may stand for one router, which needs one stream.
        wanted = {
            (address.host, address.port): address
            for found in self._found.values()
            for address in sorted(found, reverse=True)
        }
        for address in [known for known in self._open if (known.host, known.port) not in wanted]:
            _log.info("router gone", extra={"router": address.label})
            for task in self._open.pop(address).tasks:
                task.cancel()
        open_already = {(known.host, known.port) for known in self._open}
        for place, address in wanted.items():
            if place not in open_already:
                self._open[address] = self._start(address, tasks)

    def _start(self, address: RouterAddress, tasks: asyncio.TaskGroup) -> _Open:
        _log.info("router found", extra={"router": address.label})
        streams = self._open_streams(address)
        for stream in streams:
            if self._announcement is not None:
                stream.announce_drain(*self._announcement)
        return _Open(streams, [tasks.create_task(stream.run()) for stream in streams])
