"""One worker's stream to one router: opened again and again as long as both exist."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import grpc

from kvrouting.v1 import sync_pb2_grpc
from kvrouting_sidecar.backoff import Backoff
from kvrouting_sidecar.drain import DrainStanding
from kvrouting_sidecar.grpc_channel import RouterCredentials, open_channel
from kvrouting_sidecar.grpc_conversation import (
    Announcement,
    Conversation,
    EpochOverError,
    StreamClosedError,
    StreamTimes,
)
from kvrouting_sidecar.rank import Rank
from kvrouting_sidecar.router_names import RouterAddress
from kvrouting_sidecar.router_streams import StreamStatus
from kvrouting_sidecar.session import SessionError

_log = logging.getLogger(__name__)

_EPOCH_POLL_S = 0.1
# A router's own no: wrong token, a Hello that does not fit the pool, another stream in this one's place.
_REFUSALS = frozenset(
    {
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.ABORTED,
    }
)

_Call = grpc.aio.StreamStreamCall[Any, Any]


class RouterStream:
    """`run` until cancelled; `farewell` before that."""

    def __init__(
        self,
        *,
        rank: Rank,
        address: RouterAddress,
        credentials: RouterCredentials,
        backoff: Backoff,
        clock_s: Callable[[], float],
        times: StreamTimes,
        standing_changed: Callable[[], None],
    ) -> None:
        """standing_changed: called when something changed that a drain waits for."""
        self._rank = rank
        self._address = address
        self._credentials = credentials
        self._backoff = backoff
        self._clock_s = clock_s
        self._times = times
        self._standing_changed = standing_changed
        self._announcement = Announcement()
        self._talk: Conversation | None = None
        self._ended = asyncio.Event()
        self._leaving = False
        self._lost_s: float | None = None
        self._sent_messages = 0
        self._sent_snapshots = 0
        self._connects = 0
        self._last_error = ""
        self._refusal = ""

    def status(self) -> StreamStatus:
        """As of now."""
        talk = self._talk
        session = talk.session if talk else None
        return StreamStatus(
            router=self._address.label,
            rank=self._rank.facts.identity.dp_rank,
            connected=session is not None,
            unacknowledged_messages=session.unacknowledged_messages if session else 0,
            pending_blocks=session.pending_blocks if session else 0,
            lag_s=session.lag_s(self._clock_s()) if session else 0.0,
            sent_messages=self._sent_messages + (talk.sent_messages if talk else 0),
            sent_snapshots=self._sent_snapshots + (talk.sent_snapshots if talk else 0),
            connects=self._connects,
            last_error=self._last_error,
            refusal=self._refusal,
        )

    def announce_drain(self, number: int, reason: str) -> None:
        """Tell the router, at once or when it is connected."""
        self._announcement.number, self._announcement.reason = number, reason
        if self._talk is not None:
            self._talk.wake()

    def standing(self, announcement: int) -> DrainStanding | None:
        """None: this router never welcomed the worker."""
        connected = self._talk is not None and self._talk.session is not None
        if not connected and self._lost_s is None:
            return None
        return DrainStanding(
            router=self._address.label,
            rank=self._rank.facts.identity.dp_rank,
            in_flight=self._talk.in_flight(announcement) if self._talk else None,
            lost_s=None if connected else self._lost_s,
        )

    async def farewell(self) -> None:
        """Tell the router that the worker leaves, and end the stream in order."""
        self._leaving = True
        if self._talk is None:
            return
        self._ended.clear()
        self._talk.leave()
        try:
            async with asyncio.timeout(self._times.farewell_s):
                await self._ended.wait()
        except TimeoutError:
            _log.warning("the router took no farewell in time", extra={"router": self._address.label})

    async def run(self) -> None:
        """Keep a stream open."""
        while not self._leaving:
            epoch = self._rank.mirror.epoch
            if epoch is None:
                await asyncio.sleep(_EPOCH_POLL_S)
            elif not await self._once(epoch):
                await asyncio.sleep(self._backoff.next_s())

    async def _once(self, epoch: str) -> bool:
        """One stream from Hello to its end. Returns: whether to open it anew without a pause."""
        channel = open_channel(self._address, self._credentials)
        # The stubs describe the synchronous client; the asynchronous one takes no iterator.
        sync: Any = sync_pb2_grpc.WorkerSyncStub(channel).Sync
        call = sync(metadata=self._credentials.metadata())
        self._talk = talk = Conversation(
            call,
            rank=self._rank,
            epoch=epoch,
            announcement=self._announcement,
            clock_s=self._clock_s,
            times=self._times,
            on_welcome=self._welcomed,
            on_in_flight=self._standing_changed,
        )
        self._rank.listeners.add(talk)
        try:
            return await self._until_it_ends(talk, call)
        finally:
            self._rank.listeners.remove(talk)
            self._close(talk)
            call.cancel()
            await channel.close(None)
            self._ended.set()

    async def _until_it_ends(self, talk: Conversation, call: _Call) -> bool:
        try:
            await talk.run()
            async with asyncio.timeout(self._times.farewell_s):
                await call.code()
        except EpochOverError:
            return True
        except grpc.aio.AioRpcError as error:
            self._note_status(error.code(), error.details())
        except (asyncio.InvalidStateError, grpc.aio.UsageError, StreamClosedError) as error:
            if call.done():
                self._note_status(await call.code(), await call.details())
            else:
                self._note_error(str(error))
        except SessionError as error:
            self._note_error(str(error))
        except TimeoutError:
            self._note_error("the router did not answer in time")
        return False

    def _welcomed(self) -> None:
        self._connects += 1
        self._last_error = self._refusal = ""
        self._backoff.reset()
        _log.info("router connected", extra={"router": self._address.label, "rank": self._number})

    @property
    def _number(self) -> int:
        return self._rank.facts.identity.dp_rank

    def _note_status(self, code: grpc.StatusCode, details: str | None) -> None:
        self._note_error(f"{code.name}: {details}", is_refusal=code in _REFUSALS)

    def _note_error(self, text: str, *, is_refusal: bool = False) -> None:
        if text != self._last_error:
            _log.warning(
                "the stream to a router ended",
                extra={"router": self._address.label, "rank": self._number, "error": text},
            )
        self._last_error = text
        self._refusal = text if is_refusal else ""

    def _close(self, talk: Conversation) -> None:
        self._sent_messages += talk.sent_messages
        self._sent_snapshots += talk.sent_snapshots
        self._talk = None
        if talk.session is not None:
            self._lost_s = self._clock_s()
            self._standing_changed()
