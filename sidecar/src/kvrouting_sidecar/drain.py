"""Draining: the routers are told, and the answer waits until none of them has a request under way here."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

_log = logging.getLogger(__name__)

# A router whose stream broke comes back within about a second if it is still there.
_RETURN_LIMIT_S = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class DrainStanding:
    """How one stream stands in a drain.

    in_flight: what its router answered to this announcement; None: nothing yet. lost_s: when a welcomed stream broke;
    None: it is connected.
    """

    router: str
    rank: int
    in_flight: int | None
    lost_s: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class DrainResult:
    """What happened. remaining: requests that routers still had; silent: routers that never answered."""

    drained: bool
    waited_s: float
    routers: int
    remaining: int
    silent: list[str]


class DrainedStreams(Protocol):
    """All streams to routers, as a drain needs them."""

    def announce_drain(self, announcement: int, reason: str) -> None:
        """Tell every router, also those that connect later."""

    def standings(self, announcement: int) -> Iterable[DrainStanding]:
        """Of the streams that are connected, or were when they broke."""


class Drain:
    """One drain at a time; whoever asks during one shares it, and a later request announces anew."""

    def __init__(
        self,
        streams: DrainedStreams,
        *,
        limit_s: float,
        clock_s: Callable[[], float],
        changed: asyncio.Event,
    ) -> None:
        """changed: set whenever a standing changes."""
        if limit_s <= 0:
            raise ValueError(f"drain limit {limit_s} s must be above 0")
        self._streams = streams
        self._limit_s = limit_s
        self._clock_s = clock_s
        self._changed = changed
        self._announcements = 0
        self._running: asyncio.Task[DrainResult] | None = None
        self.latest: DrainResult | None = None

    @property
    def under_way(self) -> bool:
        return self._running is not None and not self._running.done()

    @property
    def announced(self) -> bool:
        """The worker takes no new requests any more."""
        return self._announcements > 0

    async def drain(self, reason: str) -> DrainResult:
        """Returns when all routers have answered 0 or the limit has passed; a caller that leaves stops nothing."""
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._drain(reason), name="drain")
        return await asyncio.shield(self._running)

    async def _drain(self, reason: str) -> DrainResult:
        start_s = self._clock_s()
        self._announcements += 1
        _log.info("drain announced", extra={"reason": reason, "limit_s": self._limit_s})
        self._streams.announce_drain(self._announcements, reason)
        try:
            async with asyncio.timeout(self._limit_s):
                while not self._is_drained():
                    await self._wait_for_change()
        except TimeoutError:
            _log.warning("the drain's limit has passed", extra={"limit_s": self._limit_s})
        self.latest = self._result(start_s)
        return self.latest

    def _holding(self) -> list[DrainStanding]:
        now_s = self._clock_s()
        return [
            standing
            for standing in self._streams.standings(self._announcements)
            if standing.lost_s is None or now_s < standing.lost_s + _RETURN_LIMIT_S
        ]

    def _is_drained(self) -> bool:
        return all(standing.in_flight == 0 for standing in self._holding())

    async def _wait_for_change(self) -> None:
        self._changed.clear()
        try:
            # A lost stream stops to hold the drain without any event.
            async with asyncio.timeout(0.2):
                await self._changed.wait()
        except TimeoutError:
            return

    def _result(self, start_s: float) -> DrainResult:
        holding = self._holding()
        return DrainResult(
            drained=all(standing.in_flight == 0 for standing in holding),
            waited_s=round(self._clock_s() - start_s, 3),
            routers=len({standing.router for standing in holding}),
            remaining=sum(standing.in_flight or 0 for standing in holding),
            silent=sorted({standing.router for standing in holding if standing.in_flight is None}),
        )
