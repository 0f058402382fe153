"""What is said on one stream from Hello to its end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvrouting.v1 import sync_pb2
from kvrouting_core.deltas import Delta
from kvrouting_sidecar import grpc_messages
from kvrouting_sidecar.rank import Rank
from kvrouting_sidecar.session import Session, SessionError, SnapshotPart

_HEARTBEAT_LIMITS_S = (0.05, 30.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamTimes:
    """flush_s: between two flushes of changes. welcome_s, stall_s: how long to wait for a Welcome, for one write."""

    flush_s: float = 0.01
    welcome_s: float = 5.0
    stall_s: float = 30.0
    farewell_s: float = 1.0

    def __post_init__(self) -> None:
        if not 0.001 <= self.flush_s <= 1:
            raise ValueError(f"flush interval {self.flush_s} s is outside 0.001..1 s")


class EpochOverError(Exception):
    """The engine has restarted: this stream speaks of a process that is gone."""


class StreamClosedError(Exception):
    """The router closed the stream in order."""


class Call(Protocol):
    """A bidirectional gRPC call."""

    async def write(self, request: sync_pb2.WorkerMessage) -> None:
        """Send; waits while the transport takes no more."""

    async def done_writing(self) -> None:
        """Nothing more will be sent."""

    def __aiter__(self) -> AsyncIterator[sync_pb2.RouterMessage]:
        """What the router says."""


@dataclass(kw_only=True, slots=True)
class Announcement:
    """The latest drain that is to be told. number 0: none."""

    number: int = 0
    reason: str = ""


class Conversation:
    """One stream. It listens to the mirror as soon as the router has welcomed the worker."""

    def __init__(
        self,
        call: Call,
        *,
        rank: Rank,
        epoch: str,
        announcement: Announcement,
        clock_s: Callable[[], float],
        times: StreamTimes,
        on_welcome: Callable[[], None],
        on_in_flight: Callable[[], None],
    ) -> None:
        self._call = call
        self._rank = rank
        self._epoch = epoch
        self._announcement = announcement
        self._clock_s = clock_s
        self._times = times
        self._on_welcome = on_welcome
        self._on_in_flight = on_in_flight
        self._wake = asyncio.Event()
        self._welcomed = asyncio.Event()
        self._heartbeat_s = 1.0
        self._next_flush_s = 0.0
        self._announced = 0
        self._in_flight: int | None = None
        self._epoch_is_over = False
        self._leaving = False
        self.session: Session | None = None
        self.sent_messages = 0
        self.sent_snapshots = 0

    # --- from outside ---

    def wake(self) -> None:
        """Something is to be sent that the mirror does not tell of."""
        self._wake.set()

    def leave(self) -> None:
        """Say Draining and end the stream."""
        self._leaving = True
        self._wake.set()

    def in_flight(self, announcement: int) -> int | None:
        """The router's latest answer to that announcement; None: none yet."""
        return self._in_flight if self._announced == announcement else None

    def changed(self, deltas: list[Delta]) -> None:
        """Of the mirror's listener."""
        if self.session is not None:
            self.session.changed(deltas, now_s=self._clock_s())
            self._wake.set()

    def replaced(self) -> None:
        """Of the mirror's listener."""
        if self.session is not None:
            self.session.replaced()
            self._wake.set()

    def new_epoch(self) -> None:
        """Of the mirror's listener."""
        self._epoch_is_over = True
        self._wake.set()

    # --- the conversation ---

    async def run(self) -> None:
        """Until the stream ends, which is always an exception, except after `leave`.

        Raises: EpochOverError, StreamClosedError, SessionError, TimeoutError, and what the call raises.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._listen(), name="listen")
                await self._speak()
        except BaseExceptionGroup as group:
            raise _first(group) from group

    async def _listen(self) -> None:
        async for message in self._call:
            self._hear(message)
        if not self._leaving:
            raise StreamClosedError("the router closed the stream")

    def _hear(self, message: sync_pb2.RouterMessage) -> None:
        kind = message.WhichOneof("body")
        if kind == "welcome" and self.session is None:
            self._begin(message.welcome)
        elif self.session is None or kind == "welcome":
            raise SessionError(f"the router said {kind} where the protocol has no place for it")
        elif kind == "ack":
            self.session.acknowledged(message.ack.messages)
            if self.session.owes:
                self._wake.set()
        elif kind == "snapshot_request":
            self.session.snapshot_requested()
            self._wake.set()
        elif kind == "in_flight":
            self._in_flight = message.in_flight.requests
            self._on_in_flight()

    def _begin(self, welcome: sync_pb2.Welcome) -> None:
        least_s, most_s = _HEARTBEAT_LIMITS_S
        self._heartbeat_s = min(max(welcome.heartbeat_interval_s, least_s), most_s)
        self.session = Session(self._rank.mirror, window_messages=max(1, welcome.window_messages))
        self._welcomed.set()
        self._on_welcome()

    async def _speak(self) -> None:
        await self._write(grpc_messages.hello(self._rank, epoch=self._epoch))
        async with asyncio.timeout(self._times.welcome_s):
            await self._welcomed.wait()
        next_heartbeat_s = self._clock_s()
        while True:
            if self._epoch_is_over:
                raise EpochOverError("the engine has restarted")
            if self._leaving:
                await self._say_farewell()
                return
            if self._announced != self._announcement.number:
                await self._announce()
            if self._clock_s() >= next_heartbeat_s:
                await self._beat()
                next_heartbeat_s = self._clock_s() + self._heartbeat_s
            if self._may_flush() and self._clock_s() >= self._next_flush_s:
                await self._flush()
            await self._wait(next_heartbeat_s)

    async def _wait(self, next_heartbeat_s: float) -> None:
        """Until there is something to do: at the latest the next heartbeat, at the earliest the next flush."""
        now_s = self._clock_s()
        if self._may_flush():
            # Changes in the meantime are part of the next flush: no need to wake up for each.
            await asyncio.sleep(max(0.0, min(self._next_flush_s, next_heartbeat_s) - now_s))
            return
        self._wake.clear()
        try:
            async with asyncio.timeout(max(0.0, next_heartbeat_s - now_s)):
                await self._wake.wait()
        except TimeoutError:
            return

    def _may_flush(self) -> bool:
        session = self.session
        return (
            session is not None and session.owes and not session.window_is_full and self._rank.mirror.in_sync
            and not self._epoch_is_over
        )  # fmt: skip

    async def _flush(self) -> None:
        self._next_flush_s = self._clock_s() + self._times.flush_s
        while self._may_flush() and self.session is not None:
            part = self.session.next_message(now_s=self._clock_s())
            if part is None:
                return
            self.sent_snapshots += isinstance(part, SnapshotPart) and part.last
            await self._write(grpc_messages.view_change(part, epoch=self._epoch))

    async def _beat(self) -> None:
        if self.session is not None:
            view = self.session.delivered
            await self._write(grpc_messages.heartbeat(self._rank, view, epoch=self._epoch))

    async def _announce(self) -> None:
        self._announced, self._in_flight = self._announcement.number, None
        await self._write(grpc_messages.draining(epoch=self._epoch, reason=self._announcement.reason))

    async def _say_farewell(self) -> None:
        await self._write(grpc_messages.draining(epoch=self._epoch, reason="the worker's sidecar stops"))
        await self._call.done_writing()

    async def _write(self, message: sync_pb2.WorkerMessage) -> None:
        async with asyncio.timeout(self._times.stall_s):
            await self._call.write(message)
        self.sent_messages += 1


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first leaf that is no cancellation, which is but a consequence."""
    leaves: Sequence[BaseException] = group.exceptions
    for leaf in leaves:
        if isinstance(leaf, BaseExceptionGroup):
            return _first(leaf)
        if not isinstance(leaf, asyncio.CancelledError):
            return leaf
    return leaves[0]
