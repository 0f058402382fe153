"""One attempt on one worker: forward the request, bring the answer back, say how it ended."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, Self

import aiohttp
from aiohttp import web

from kvrouting_core.routing.events import Outcome
from kvrouting_router.client_call import ClientCall
from kvrouting_router.dispatcher import Reservation
from kvrouting_router.error_bodies import error_event
from kvrouting_router.errors import (
    ClientTooSlowError,
    EngineAnswer,
    RouterError,
    TotalTimeoutError,
    UpstreamError,
    UpstreamTimeoutError,
)
from kvrouting_router.http_headers import DECISION_HEADER, to_client
from kvrouting_router.options import TimeLimits
from kvrouting_router.sse import EventSplitter
from kvrouting_router.upstream import UPSTREAM_FAILURES, Upstream, unreachable
from kvrouting_router.usage import StreamedTokens, Usage, usage_of_body
from kvrouting_router.worker_registry import WorkerFacts

_ERROR_ANSWER_BYTES = 1 << 20
_CLIENT = "client"
# asyncio's transports make a writer wait above 64 KiB.
_NEVER_WAITS_BYTES = 60_000


class FirstTokenListener(Protocol):
    """Hears that the worker has computed the prompt."""

    def __call__(self, reservation: Reservation, *, streaming: bool) -> None:
        """streaming: it is the moment of the first token; otherwise the whole answer is there."""


class WaitLimit:
    """The earlier of a step's own limit and the request's deadline, as a context around the wait."""

    def __init__(self, call: ClientCall, facts: WorkerFacts, limit_s: float, what: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._deadline_s = call.deadline_s
        self._facts = facts
        self._timeout = asyncio.timeout(None)
        # Steps are as many as events, and each would cost a timer: one that is early looks again when it is time.
        self._timer: asyncio.TimerHandle | None = None
        self.restart(limit_s, what)

    def restart(self, limit_s: float, what: str) -> None:
        """The next step begins."""
        self._limit_s, self._what = limit_s, what
        self._due_s = min(self._deadline_s, self._loop.time() + limit_s)
        if self._timer is not None and self._due_s < self._timer.when():
            self._set_timer()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(self._due_s, self._look)

    def _look(self) -> None:
        if self._loop.time() < self._due_s:
            self._set_timer()
        else:
            self._timeout.reschedule(self._due_s)

    async def __aenter__(self) -> Self:
        await self._timeout.__aenter__()
        self._set_timer()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        try:
            await self._timeout.__aexit__(kind, error, trace)
        except TimeoutError as timeout:
            raise self._error() from timeout

    def _error(self) -> RouterError:
        if self._loop.time() >= self._deadline_s:
            return TotalTimeoutError("the request took longer than its total time limit")
        if self._what == _CLIENT:
            return ClientTooSlowError(f"the client took nothing for {self._limit_s:g} s")
        return UpstreamTimeoutError(f"worker {self._facts.worker} sent no {self._what} within {self._limit_s:g} s")


class EventStream(web.StreamResponse):
    """Its head goes out together with the first event: one packet and one system call less."""

    _send_headers_immediately = False


@dataclass(slots=True, kw_only=True)
class Finish:
    """How an attempt went, as far as it got."""

    outcome: Outcome = Outcome.FAILED
    status: int | None = None
    usage: Usage = field(default_factory=Usage)
    first_byte_ms: float | None = None
    error: RouterError | None = None


class Attempt:
    """Runs once. What the caller wants to know of it afterwards is in `finish`."""

    def __init__(
        self,
        *,
        call: ClientCall,
        client: web.BaseRequest,
        facts: WorkerFacts,
        reservation: Reservation,
        upstream: Upstream,
        times: TimeLimits,
        decision_header: str,
        on_first_token: FirstTokenListener,
    ) -> None:
        self._call = call
        self._client = client
        self._facts = facts
        self._reservation = reservation
        self._upstream = upstream
        self._times = times
        self._decision_header = decision_header
        self._on_first_token = on_first_token
        self._tokens = StreamedTokens(call.api)
        self._answer: aiohttp.ClientResponse | None = None
        self._begun: web.StreamResponse | None = None  # the client has a part of it
        self.finish = Finish()

    async def run(self, trace_headers: dict[str, str]) -> web.StreamResponse:
        """The response, complete or (a stream) already sent.

        Raises: UpstreamError if another worker may try; TotalTimeoutError; ConnectionError if the client is gone.
        """
        call, times = self._call, self._times
        limit_s = times.first_byte_s if call.form.stream else times.total_s
        try:
            async with WaitLimit(call, self._facts, limit_s, "answer") as limit:
                self._answer = answer = await self._upstream.post(
                    self._facts, call.api, query=call.query, body=call.body, headers=call.headers,
                    trace_headers=trace_headers,
                )  # fmt: skip
                self.finish.status = answer.status
                if answer.status >= 500:
                    raise await self._refused(answer)
                if answer.content_type != "text/event-stream" or answer.status >= 400:
                    return await self._relay_whole(answer)
                return await self._relay_stream(answer, limit)
        except RouterError as error:
            self.finish.error = error
            if self._begun is None:
                raise
            if self.finish.outcome is Outcome.COMPLETED:  # the client has its end mark: nothing is missing
                await self._begun.write_eof()
                return self._begun
            return await self._break_off(self._begun, error)
        finally:
            if self._answer is not None:
                # Closes the connection if the answer is incomplete: so the engine learns that nobody listens.
                self._answer.release()

    async def _refused(self, answer: aiohttp.ClientResponse) -> UpstreamError:
        body = await self._read(answer)
        return UpstreamError(
            f"worker {self._facts.worker} answered {answer.status}",
            answer=EngineAnswer(
                status=answer.status, headers=to_client(answer.headers), body=body[:_ERROR_ANSWER_BYTES]
            ),
        )

    async def _read(self, answer: aiohttp.ClientResponse) -> bytes:
        try:
            return await answer.read()
        except UPSTREAM_FAILURES as error:
            raise unreachable(self._facts, error) from error

    async def _relay_whole(self, answer: aiohttp.ClientResponse) -> web.Response:
        """Nothing goes to the client before everything is here, so a worker that dies can still be replaced."""
        body = await self._read(answer)
        rejected = answer.status >= 400
        if not rejected:
            self.finish.usage = usage_of_body(self._call.api, body)
            self._on_first_token(self._reservation, streaming=False)
        self.finish.outcome = Outcome.REJECTED if rejected else Outcome.COMPLETED
        response = web.Response(status=answer.status, body=body, headers=to_client(answer.headers))
        response.headers[DECISION_HEADER] = self._decision_header
        return response

    async def _relay_stream(self, answer: aiohttp.ClientResponse, limit: WaitLimit) -> web.StreamResponse:
        """Until the first whole event another worker may take over; from then on the stream is the client's."""
        splitter = EventSplitter()
        ready, more = await self._next_events(answer, splitter)
        self.finish.first_byte_ms = asyncio.get_running_loop().time() * 1000
        self._on_first_token(self._reservation, streaming=True)
        response = EventStream(status=answer.status, headers=to_client(answer.headers))
        response.headers[DECISION_HEADER] = self._decision_header
        await response.prepare(self._client)
        self._begun = response
        while more:
            self._limit_write(ready, limit)
            await response.write(ready)
            self._tokens.take(ready)
            if splitter.has_end_mark:
                self._complete(splitter)
            limit.restart(self._times.idle_s, "event")
            ready, more = await self._next_events(answer, splitter)
        if ready:
            self._limit_write(ready, limit)
            self._tokens.take(ready)
        else:
            self._complete(splitter)
        await response.write_eof(ready)
        self._complete(splitter)
        return response

    def _complete(self, splitter: EventSplitter) -> None:
        """The client has the whole answer: many close their connection as soon as they have seen its last event."""
        if self.finish.outcome is not Outcome.COMPLETED:
            self.finish.usage = self._tokens.usage(splitter.last_payloads())
            self.finish.outcome = Outcome.COMPLETED

    def _limit_write(self, ready: bytes, limit: WaitLimit) -> None:
        """Only a write that may wait for the client is worth a limit."""
        if self._may_have_to_wait(len(ready)):
            limit.restart(self._times.client_write_s, _CLIENT)

    def _may_have_to_wait(self, size_bytes: int) -> bool:
        """Whether a write of this size can fill the transport's buffer, so that it waits for the client."""
        transport = self._client.transport
        return transport is None or transport.get_write_buffer_size() + size_bytes >= _NEVER_WAITS_BYTES

    async def _next_events(self, answer: aiohttp.ClientResponse, splitter: EventSplitter) -> tuple[bytes, bool]:
        """At least one whole event, or the rest. Returns: bytes to send, whether more may come."""
        content = answer.content
        try:
            while chunk := await content.readany():
                ready = splitter.feed(chunk)
                if content.at_eof():  # the end came along with the last events, and goes on along with them
                    return ready + splitter.rest(), False
                if ready:
                    return ready, True
        except UPSTREAM_FAILURES as error:
            raise unreachable(self._facts, error) from error
        return splitter.rest(), False

    async def _break_off(self, response: web.StreamResponse, error: RouterError) -> web.StreamResponse:
        """The client's answer has begun and cannot be completed: its last event says so.

        Raises: ConnectionResetError if it is the client that takes nothing.
        """
        if isinstance(error, ClientTooSlowError):
            self.finish.outcome = Outcome.CANCELLED
            raise ConnectionResetError(error.message) from error
        self.finish.outcome = Outcome.FAILED
        async with asyncio.timeout(self._times.client_write_s):
            await response.write(error_event(error, self._call.api.error_shape))
            await response.write_eof()
        return response
