"""A generation request from end to end: read, decide, try workers, account for every outcome."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter

from aiohttp import web

from kvrouting_core.identity import WorkerId
from kvrouting_core.routing.events import Outcome, RoutingRequest
from kvrouting_router.attempt import Attempt
from kvrouting_router.client_call import CallReader, ClientCall
from kvrouting_router.decision_log import (
    DecisionFile,
    DecisionLog,
    RequestLengths,
    RequestOutcome,
    ShownDecision,
)
from kvrouting_router.dispatcher import Reservation
from kvrouting_router.errors import (
    EngineAnswer,
    NoWorkerReadyError,
    OverloadedError,
    RouterError,
    StoppingError,
    TotalTimeoutError,
    UpstreamError,
    http_status,
)
from kvrouting_router.metrics import RouterMetrics
from kvrouting_router.options import RouterOptions
from kvrouting_router.pool import Pool
from kvrouting_router.prompt_reading import PromptReader, ReadPrompt
from kvrouting_router.request_forms import Api
from kvrouting_router.tracing import RequestTrace, Tracer
from kvrouting_router.upstream import Upstream


@dataclass(slots=True, kw_only=True)
class _Request:
    """What the parts of one request's handling share."""

    call: ClientCall
    client: web.BaseRequest
    prompt: ReadPrompt
    routing: RoutingRequest
    trace: RequestTrace
    attempts: int = 0


class Relay:
    """Everything between a client's request and its answer."""

    def __init__(
        self,
        *,
        pool: Pool,
        reader: PromptReader,
        calls: CallReader,
        upstream: Upstream,
        decisions: DecisionLog,
        decision_file: DecisionFile | None,
        metrics: RouterMetrics,
        tracer: Tracer,
        options: RouterOptions,
    ) -> None:
        self._pool = pool
        self._dispatcher = pool.dispatcher
        self._reader = reader
        self._calls = calls
        self._upstream = upstream
        self._decisions = decisions
        self._decision_file = decision_file
        self._metrics = metrics
        self._tracer = tracer
        self._options = options

    async def serve(self, client: web.BaseRequest, api: Api) -> web.StreamResponse:
        """Answers one request. Raises: RouterError as the client should see it; ConnectionError if it has left."""
        trace = self._tracer.request(client.headers, path=api.value)
        status, error = 499, "the client left"  # nginx's number for it; nobody receives it
        try:
            response = await self._serve(client, api, trace)
            status, error = response.status, ""
        except RouterError as failure:
            status, error = http_status(failure), failure.message
            raise
        finally:
            trace.end(status=status, error=error or None)
        return response

    async def _serve(self, client: web.BaseRequest, api: Api, trace: RequestTrace) -> web.StreamResponse:
        call = await self._calls.read(client, api, arrived_ms=self._dispatcher.now_ms())
        prompt = await self.read_prompt(call, trace)
        request = _Request(call=call, client=client, prompt=prompt, routing=call.routing(prompt), trace=trace)
        failure: UpstreamError | None = None
        while request.attempts < self._options.routing.max_attempts:
            try:
                reservation = await self._decide(request)
            except (NoWorkerReadyError, OverloadedError):
                # Who was admitted once hears how that failed, not that there is no place.
                if failure is None:
                    raise
                break
            try:
                return await self._attempt(request, reservation)
            except UpstreamError as error:
                failure = error
                self._exclude(request, reservation.worker)
        if failure is None:
            raise NoWorkerReadyError("no worker is ready to take this request")
        if failure.answer is not None:
            return _handed_on(failure.answer)
        raise failure

    async def read_prompt(self, call: ClientCall, trace: RequestTrace) -> ReadPrompt:
        """Tokenizes and hashes off the loop."""
        started_s = perf_counter()
        with trace.tokenize():
            prompt = await self._reader.read(call.form)
        self._metrics.tokenization_s.observe(perf_counter() - started_s)
        return prompt

    def _exclude(self, request: _Request, worker: WorkerId) -> None:
        request.routing = replace(request.routing, excluded=request.routing.excluded | {worker})

    async def _decide(self, request: _Request) -> Reservation:
        """Waits for the policy's word. Raises: as `Dispatcher.place`; TotalTimeoutError."""
        call = request.call
        try:
            with request.trace.decide():
                reservation = await self.place(request.routing, arrived_ms=call.arrived_ms, deadline_s=call.deadline_s)
                request.trace.decided(reservation.decision)
        except TimeoutError as error:
            raise TotalTimeoutError("no worker had room within the request's total time limit") from error
        request.attempts += 1
        if request.attempts > 1:
            self._metrics.retries.inc()
        return reservation

    async def place(
        self, routing: RoutingRequest, *, arrived_ms: float | None = None, deadline_s: float | None = None
    ) -> Reservation:
        """A reservation for the request; refusals are counted, some decisions audited. Raises: as the dispatcher."""
        started_s = perf_counter()
        try:
            reservation = await self._dispatcher.place(routing, arrived_ms=arrived_ms, deadline_s=deadline_s)
        except (NoWorkerReadyError, OverloadedError, StoppingError) as refusal:
            self._metrics.refusals.labels(refusal.refusal).inc()
            raise
        decision = reservation.decision
        if decision.waited_ms == 0:
            self._metrics.decision_s.observe(perf_counter() - started_s)
        self._metrics.queue_wait_s.observe(decision.waited_ms / 1000)
        self._metrics.prompt_tokens.inc(decision.prompt_tokens)
        if not reservation.matched_tokens:
            # Policies that do not look at caches leave it at 0; whether views are true is watched all the same.
            reservation.matched_tokens = self._pool.matched_tokens(reservation.worker, routing)
        self._metrics.matched_tokens.inc(reservation.matched_tokens)
        every = self._options.routing.audit_every
        if every and self._decisions.count % every == 0:
            self._pool.audit(routing.blocks)
        return reservation

    async def _attempt(self, request: _Request, reservation: Reservation) -> web.StreamResponse:
        with reservation:
            shown = self._decisions.add(reservation.decision)
            worker = self._pool.registry.get(reservation.worker)
            if worker is None:
                raise UpstreamError(f"worker {reservation.worker} went while the request was on its way")
            trace = request.trace.attempt(reservation.decision, worker.facts.endpoint)
            attempt = Attempt(
                call=request.call,
                client=request.client,
                facts=worker.facts,
                reservation=reservation,
                upstream=self._upstream,
                times=self._options.times,
                decision_header=shown.header_value(limit_bytes=self._options.sizes.decision_header_bytes),
                on_first_token=partial(self._first_token, request),
            )
            try:
                return await attempt.run(dict(trace.headers))
            except (asyncio.CancelledError, ConnectionError):
                if attempt.finish.outcome is not Outcome.COMPLETED:
                    attempt.finish.outcome = Outcome.CANCELLED
                raise
            finally:
                error = attempt.finish.error
                trace.end(status=attempt.finish.status, error=error.message if error else None)
                self._finished(request, reservation, attempt, shown)

    def _first_token(self, request: _Request, reservation: Reservation, *, streaming: bool) -> None:
        if streaming:
            reservation.first_token()
            loop = asyncio.get_running_loop()
            loop.call_later(self._options.routing.prefix_credit_s, self._end_credit, reservation)
        self._pool.prefilled(reservation, request.prompt)

    def _end_credit(self, reservation: Reservation) -> None:
        if reservation.is_open:
            self._pool.stop_awaiting(reservation)
            reservation.prefix_arrived()

    def _finished(self, request: _Request, reservation: Reservation, attempt: Attempt, shown: ShownDecision) -> None:
        finish, call = attempt.finish, request.call
        self._pool.stop_awaiting(reservation)
        usage = finish.usage
        reservation.end(finish.outcome, output_tokens=usage.output_tokens, cached_tokens=usage.cached_tokens)
        now_ms = self._dispatcher.now_ms()
        self._metrics.requests.labels(call.api.value, finish.outcome.value).inc()
        if finish.outcome is Outcome.FAILED and isinstance(finish.error, UpstreamError):
            self._metrics.failed_attempts.labels(type(finish.error).__name__).inc()
            self._pool.attempt_failed(reservation.worker, finish.error.message)
        elif finish.outcome in (Outcome.COMPLETED, Outcome.REJECTED):
            self._pool.attempt_succeeded(reservation.worker)
        if finish.outcome is Outcome.COMPLETED:
            self._completed(request, reservation, finish.first_byte_ms, now_ms, usage.cached_tokens)
        if self._decision_file is not None:
            self._decision_file.add(shown, _lengths(request), _outcome(request, attempt, now_ms))

    def _completed(
        self,
        request: _Request,
        reservation: Reservation,
        first_byte_ms: float | None,
        now_ms: float,
        cached_tokens: int | None,
    ) -> None:
        arrived_ms = request.call.arrived_ms
        self._metrics.first_byte_s.observe(((first_byte_ms or now_ms) - arrived_ms) / 1000)
        self._metrics.end_to_end_s.observe((now_ms - arrived_ms) / 1000)
        if cached_tokens is not None:
            self._metrics.cached_tokens.inc(cached_tokens)
        form = request.call.form
        single = form.sequences == 1 and not form.further and request.prompt.exact
        self._pool.account(reservation, reported_cached_tokens=cached_tokens, single=single)


def _handed_on(answer: EngineAnswer) -> web.Response:
    """An engine's own error, when no other worker could do better."""
    return web.Response(status=answer.status, body=answer.body, headers=answer.headers)


def _lengths(request: _Request) -> RequestLengths:
    call, routing = request.call, request.routing
    return RequestLengths(
        api=call.api.value,
        arrived_ms=call.arrived_ms,
        prompt_tokens=routing.prompt_tokens,
        further_prompt_tokens=routing.further_prompt_tokens,
        sequences=routing.sequences,
        max_output_tokens=routing.max_output_tokens,
        exact=request.prompt.exact,
        stream=call.form.stream,
    )


def _outcome(request: _Request, attempt: Attempt, now_ms: float) -> RequestOutcome:
    finish, arrived_ms = attempt.finish, request.call.arrived_ms
    return RequestOutcome(
        outcome=finish.outcome.value,
        attempt=request.attempts,
        first_byte_ms=None if finish.first_byte_ms is None else finish.first_byte_ms - arrived_ms,
        end_ms=now_ms - arrived_ms,
        output_tokens=finish.usage.output_tokens,
        cached_tokens=finish.usage.cached_tokens,
    )
