"""Drives one rank's mirror: feeds it what the engine publishes and puts its questions to the engine."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass

from kvrouting_sidecar.backoff import Backoff
from kvrouting_sidecar.engine_info import EngineInfo
from kvrouting_sidecar.engine_sockets import EngineSilentError, EngineSockets
from kvrouting_sidecar.event_queue import Dropped, NewConnection, ReceivedBatch
from kvrouting_sidecar.event_reader import Published
from kvrouting_sidecar.mirror_terms import EventSource, NeedIdentity, NeedReplay, NeedSnapshot
from kvrouting_sidecar.rank_mirror import RankMirror
from kvrouting_sidecar.wire_events import EngineState, UndecodableError, decode_batch

_log = logging.getLogger(__name__)

# The loop has other work: health pages, streams. A slice is a few batches.
_SLICE_S = 0.004
_FINGERPRINT_LIMIT_S = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class FollowerTimes:
    """verify_s: between two comparisons with the engine. answer_limit_s: how long to wait for one message of an answer.
    lost_after: answers that did not come until the state socket counts as lost.
    """

    verify_s: float = 2.0
    answer_limit_s: float = 2.0
    lost_after: int = 3
    snapshot_limit_s: float = 120.0

    def __post_init__(self) -> None:
        if not 0 < self.verify_s < math.inf:
            raise ValueError(f"verify interval {self.verify_s} s must be above 0 and finite")


class RankFollower:
    """One rank; `run` until cancelled."""

    def __init__(
        self,
        *,
        mirror: RankMirror,
        published: Published,
        arrived: asyncio.Event,
        sockets: EngineSockets,
        describe_engine: Callable[[], Awaitable[EngineInfo | None]],
        new_epoch_name: Callable[[], str],
        backoff: Callable[[], Backoff],
        clock_s: Callable[[], float],
        times: FollowerTimes,
    ) -> None:
        """arrived: set when the queue got something. describe_engine: asks for `/server_info`; None: no answer."""
        self.mirror = mirror
        self._published = published
        self._queue = published.queue
        self._connection = 0
        self._arrived = arrived
        self._sockets = sockets
        self._describe_engine = describe_engine
        self._new_epoch_name = new_epoch_name
        self._identity_backoff = backoff()
        self._snapshot_backoff = backoff()
        self._clock_s = clock_s
        self._times = times
        self._state_failures = 0
        self.latest_state: EngineState | None = None
        self.replay_answered = False

    async def run(self) -> None:
        """Follow the stream and compare with the engine."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow(), name="follow")
            tasks.create_task(self._watch_state(), name="watch-state")

    async def _follow(self) -> None:
        while True:
            need = self.mirror.need
            if isinstance(need, NeedIdentity):
                await self._identify(need)
            elif isinstance(need, NeedReplay):
                await self._replay(need)
            elif isinstance(need, NeedSnapshot):
                await self._snapshot(need)
            elif self._read_slice():
                await asyncio.sleep(0)
            else:
                self._arrived.clear()
                if not self._queue and self.mirror.need is None:
                    await self._arrived.wait()

    def _read_slice(self) -> bool:
        """Some of what waits. Returns: whether there was anything."""
        end_s = self._clock_s() + _SLICE_S
        item = self._queue.peek()
        if item is None:
            return False
        while item is not None and self.mirror.need is None:
            if not isinstance(item, ReceivedBatch):
                self._pass_mark(item)
            elif self._offer(item.sequence, item.payload, replayed=False):
                self._queue.take()
            if self._clock_s() >= end_s:
                break
            item = self._queue.peek()
        return True

    def _pass_mark(self, mark: Dropped | NewConnection) -> None:
        self._queue.take()
        if isinstance(mark, Dropped):
            self.mirror.batches_dropped()
        elif mark.number > self._connection:
            self._connection = mark.number
            self.mirror.connection_changed()

    def _offer(self, sequence: int, payload: bytes, *, replayed: bool) -> bool:
        try:
            events = decode_batch(payload).events
        except UndecodableError as error:
            _log.warning("an event batch cannot be read", extra={"sequence": sequence, "error": str(error)})
            return self.mirror.undecodable(sequence, str(error), replayed=replayed)
        return self.mirror.offer(sequence, events, replayed=replayed)

    # --- questions ---

    async def _identify(self, need: NeedIdentity) -> None:
        """Ask until the engine says who it is, and be sure to hear the same process.

        A connection that stands when the known process answers is a connection to it. When another one answers, the
        present connection may still be that to its predecessor, with batches of it in the queue: so everything that
        came before a connection made after the answer is thrown away.
        """
        _log.info("asking which engine process speaks", extra={"reason": need.reason})
        await self._connected(self._published.connection)
        event_source = await self._ask_for_source()
        while not self.mirror.knows(event_source):
            await self._connected(self._published.ask_for_new_connection())
            confirmed = await self._ask_for_source()
            if confirmed == event_source:
                break
            event_source = confirmed
        self._forget_before(self._published.connection if not self.mirror.knows(event_source) else 0)
        self.mirror.identified(event_source, fallback_epoch=event_source.fingerprint or self._new_epoch_name())

    async def _connected(self, connection: int) -> None:
        """Wait until that connection or a later one stands."""
        while not (self._published.connected and self._published.connection >= connection):
            self._arrived.clear()
            try:
                # The thread wakes this loop when it is connected; the limit covers what fell between the two lines.
                async with asyncio.timeout(0.2):
                    await self._arrived.wait()
            except TimeoutError:
                continue

    def _forget_before(self, connection: int) -> None:
        """Throw away what came over earlier connections."""
        while self._connection < connection:
            item = self._queue.take()
            if isinstance(item, NewConnection):
                self._connection = item.number

    async def _ask_for_source(self) -> EventSource:
        while True:
            state = await self._ask_state()
            info = await self._describe(limit_s=_FINGERPRINT_LIMIT_S if state else None)
            if state or info:
                self._identity_backoff.reset()
                return EventSource(
                    epoch=state.epoch if state else None, fingerprint=info.start_fingerprint if info else None
                )
            await asyncio.sleep(self._identity_backoff.next_s())

    async def _describe(self, *, limit_s: float | None) -> EngineInfo | None:
        """The engine's description. limit_s: when its state is known, its fingerprint is but a reserve for the time
        when the state socket falls silent.
        """
        try:
            async with asyncio.timeout(limit_s):
                return await self._describe_engine()
        except TimeoutError:
            return None

    async def _replay(self, need: NeedReplay) -> None:
        _log.info("asking for a replay", extra={"first": need.first, "reason": need.reason})
        batches, failure = 0, None
        slice_end_s = self._clock_s() + _SLICE_S
        try:
            async with aclosing(self._sockets.replay(need.first)) as replay:
                async for sequence, payload in replay:
                    batches += 1
                    if not self._offer(sequence, payload, replayed=True):
                        break
                    if self._clock_s() >= slice_end_s:
                        await asyncio.sleep(0)
                        slice_end_s = self._clock_s() + _SLICE_S
            self.replay_answered = True
        except (EngineSilentError, UndecodableError) as error:
            failure = str(error)
        self.mirror.replay_ended(batches=batches, failure=failure)

    async def _snapshot(self, need: NeedSnapshot) -> None:
        _log.info("asking for a snapshot", extra={"reason": need.reason})
        try:
            async with asyncio.timeout(self._times.snapshot_limit_s):
                state = await self._take_in_snapshot()
        except (EngineSilentError, UndecodableError, TimeoutError) as error:
            reason = str(error) or f"no snapshot within {self._times.snapshot_limit_s} s"
            _log.warning("no snapshot", extra={"error": reason})
            self.mirror.snapshot_failed(reason)
            await asyncio.sleep(self._snapshot_backoff.next_s())
            return
        if state is None:
            return
        self.mirror.snapshot_complete(state)
        self._note_state(state)
        if self.mirror.need is None:
            self._snapshot_backoff.reset()
        else:
            await asyncio.sleep(self._snapshot_backoff.next_s())

    async def _take_in_snapshot(self) -> EngineState | None:
        """Returns: the engine's state after the last piece; None if another process gave it."""
        begun = False
        async with aclosing(self._sockets.snapshot()) as chunks:
            async for chunk in chunks:
                if not begun and not self.mirror.snapshot_begins(chunk.epoch, chunk.position):
                    return None
                begun = True
                self.mirror.snapshot_piece(chunk.events)
                await asyncio.sleep(0)
        return await self._sockets.state()

    # --- the comparison ---

    async def _watch_state(self) -> None:
        while True:
            await asyncio.sleep(self._times.verify_s)
            state = await self._ask_state()
            if state is not None:
                self.mirror.engine_state(state)
                self._arrived.set()

    async def _ask_state(self) -> EngineState | None:
        """The engine's state; None if it is silent, which is counted."""
        try:
            state = await self._sockets.state()
        except (EngineSilentError, UndecodableError) as error:
            self._state_failures += 1
            if self._state_failures == self._times.lost_after:
                _log.warning("the state socket is of no use", extra={"error": str(error)})
            if self._state_failures >= self._times.lost_after:
                self.latest_state = None
                self.mirror.state_lost(str(error))
            return None
        self._note_state(state)
        return state

    def _note_state(self, state: EngineState) -> None:
        self._state_failures = 0
        self.latest_state = state
