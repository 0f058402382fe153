"""Faults on order: what real engines do wrong, by options at the start or by POST /misbehave while it runs.

Each fault is a JSON object with `action` and the fields of its struct below.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence

import msgspec
from aiohttp import web

from kvrouting_simulator.engine_process.http_answers import Handler, cut, error_reply, json_reply
from kvrouting_simulator.engine_process.http_bodies import BadRequestError
from kvrouting_simulator.engine_process.rank import Rank

_log = logging.getLogger(__name__)


class _Fault(msgspec.Struct, forbid_unknown_fields=True, tag_field="action"):
    """dp_rank: the rank that misbehaves; None: all."""


class Stall(_Fault, tag="stall"):
    """No step is started or ended for so long; None: until `behave`."""

    seconds: float | None = None
    dp_rank: int | None = None


class Die(_Fault, tag="die"):
    """After so many more tokens the process ends at once with this exit code, streams and all."""

    after_tokens: int = 0
    exit_code: int = 1


class CutConnections(_Fault, tag="cut_connections"):
    """After so many more tokens every request's connection is cut; the process lives on."""

    after_tokens: int = 0


class DropEvents(_Fault, tag="drop_events"):
    """Loses the next `batches`, and later ones with `probability`. replay false: not to be had by replay either."""

    batches: int = 0
    probability: float = 0.0
    replay: bool = True
    dp_rank: int | None = None


class DuplicateEvents(_Fault, tag="duplicate_events"):
    """Publishes the next `batches` twice."""

    batches: int = 1
    dp_rank: int | None = None


class DelayEvents(_Fault, tag="delay_events"):
    """Publishes every batch so much later; 0 ends it."""

    seconds: float
    dp_rank: int | None = None


class Restart(_Fault, tag="restart"):
    """A new process in the same place: new epoch, empty cache, sequence from 0, all requests lost."""

    dp_rank: int | None = None


class SilenceState(_Fault, tag="silence_state"):
    """The state socket answers nothing for so long; None: until `behave`."""

    seconds: float | None = None
    dp_rank: int | None = None


class RefuseHttp(_Fault, tag="refuse_http"):
    """Every path but /misbehave answers with this status for so long; None: until `behave`."""

    seconds: float | None = None
    status: int = 503


class Behave(_Fault, tag="behave"):
    """Ends all of it."""


Fault = (
    Stall | Die | CutConnections | DropEvents | DuplicateEvents | DelayEvents | Restart | SilenceState
    | RefuseHttp | Behave
)  # fmt: skip
_faults = msgspec.json.Decoder(Fault)


def parse_fault(text: str | bytes) -> Fault:
    """Raises: BadRequestError naming what is wrong."""
    try:
        return _faults.decode(text)
    except msgspec.DecodeError as error:
        raise BadRequestError(f"no known misbehaviour: {error}") from error


class FaultInjection:
    """Carries the faults out. exit_process: ends the process at once."""

    def __init__(self, *, exit_process: Callable[[int], None] = os._exit) -> None:
        self._ranks: Sequence[Rank] = ()
        self._exit = exit_process
        self._refused_status: int | None = None
        self._timers: list[asyncio.TimerHandle] = []
        self._requests: dict[int, web.Request] = {}  # by identity: requests do not hash
        self._tokens_left: int | None = None
        self._at_zero: Callable[[], None] = self.behave

    def take_over(self, ranks: Sequence[Rank]) -> None:
        """These ranks can be made to misbehave."""
        self._ranks = ranks

    def order(self, fault: Fault) -> None:
        """Does it, from now on. Raises: BadRequestError for a rank that does not exist."""
        _log.warning("misbehaving as ordered: %s", fault)
        match fault:
            case Stall():
                self._on_ranks(fault.dp_rank, lambda r: r.loop.stall(), lambda r: r.loop.resume(), fault.seconds)
            case Die():
                self._count_down(fault.after_tokens, lambda: self._exit(fault.exit_code))
            case CutConnections():
                self._count_down(fault.after_tokens, self._cut_all)
            case Restart():
                self._on_ranks(fault.dp_rank, lambda r: r.restart(), None, None)
            case SilenceState():
                self._on_ranks(
                    fault.dp_rank, lambda r: r.silence_state(True), lambda r: r.silence_state(False), fault.seconds
                )
            case RefuseHttp():
                self._refused_status = fault.status
                self._later(fault.seconds, self._accept)
            case Behave():
                self.behave()
            case _:
                self._order_events(fault)

    def _order_events(self, fault: DropEvents | DuplicateEvents | DelayEvents) -> None:
        for rank in self._chosen(fault.dp_rank):
            match fault:
                case DropEvents():
                    rank.event_faults.drop(
                        batches=fault.batches, probability=fault.probability, replayable=fault.replay
                    )
                case DuplicateEvents():
                    rank.event_faults.duplicate(batches=fault.batches)
                case DelayEvents():
                    rank.event_faults.delay(seconds=fault.seconds)

    def behave(self) -> None:
        """Ends everything that was ordered."""
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        self._accept()
        self._tokens_left = None
        for rank in self._ranks:
            rank.loop.resume()
            rank.silence_state(False)
            rank.event_faults.clear()

    def produced(self, tokens: int) -> None:
        """So many tokens came out of the engine; the last of a countdown strikes before they are handed on."""
        if self._tokens_left is None:
            return
        self._tokens_left -= tokens
        if self._tokens_left <= 0:
            self._tokens_left = None
            self._at_zero()

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Refuses requests while ordered to, and knows whose connections there are to cut."""
        if request.path == "/misbehave":
            return await handler(request)
        if self._refused_status is not None:
            return error_reply("the engine refuses requests as ordered", status=self._refused_status, kind="Refused")
        self._requests[id(request)] = request
        try:
            return await handler(request)
        finally:
            del self._requests[id(request)]

    async def handle(self, request: web.Request) -> web.Response:
        """POST /misbehave."""
        self.order(parse_fault(await request.read()))
        return json_reply({"ordered": True})

    def _count_down(self, tokens: int, strike: Callable[[], None]) -> None:
        if tokens <= 0:
            # The answer to the order itself gets out first.
            self._timers.append(asyncio.get_running_loop().call_later(0.05, strike))
            return
        self._tokens_left, self._at_zero = tokens, strike

    def _cut_all(self) -> None:
        for request in list(self._requests.values()):
            cut(request)

    def _accept(self) -> None:
        self._refused_status = None

    def _on_ranks(
        self,
        number: int | None,
        begin: Callable[[Rank], None],
        end: Callable[[Rank], None] | None,
        seconds: float | None,
    ) -> None:
        for rank in self._chosen(number):
            begin(rank)
            if end is not None:
                self._later(seconds, lambda rank=rank: end(rank))  # type: ignore[misc]

    def _later(self, seconds: float | None, then: Callable[[], None]) -> None:
        if seconds is not None:
            self._timers.append(asyncio.get_running_loop().call_later(seconds, then))

    def _chosen(self, number: int | None) -> Sequence[Rank]:
        if number is None:
            return self._ranks
        if not 0 <= number < len(self._ranks):
            raise BadRequestError(f"dp_rank {number} is outside 0..{len(self._ranks) - 1}", param="dp_rank")
        return [self._ranks[number]]
