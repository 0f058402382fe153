"""The decision without the relay, for gateways that carry the bytes themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, NoReturn

import grpc
import grpc.aio

from kvrouting.v1 import pick_pb2, pick_pb2_grpc
from kvrouting_core.blocks import Namespace
from kvrouting_core.routing.events import Outcome, RoutingRequest
from kvrouting_router.client_call import ApiKeys, RequestIds
from kvrouting_router.decision_log import DecisionLog
from kvrouting_router.dispatcher import Reservation
from kvrouting_router.errors import (
    InvalidRequestError,
    NotReadyError,
    OverloadedError,
    RouterError,
    UnauthenticatedError,
    UnknownModelError,
)
from kvrouting_router.options import TimeLimits
from kvrouting_router.pool import Pool
from kvrouting_router.prompt_reading import PromptReader, ReadPrompt
from kvrouting_router.relay import Relay
from kvrouting_router.request_forms import (
    Api,
    GenerationForm,
    OpaquePrompt,
    Prompt,
    TextPrompt,
    TokenPrompt,
    decode_body,
    parse_form,
)

Context = grpc.aio.ServicerContext[Any, Any]

_STATUS = (
    (UnauthenticatedError, grpc.StatusCode.UNAUTHENTICATED),
    (UnknownModelError, grpc.StatusCode.NOT_FOUND),
    (InvalidRequestError, grpc.StatusCode.INVALID_ARGUMENT),
    (OverloadedError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (NotReadyError, grpc.StatusCode.UNAVAILABLE),
)
_OUTCOMES = {
    pick_pb2.ReportRequest.EVENT_COMPLETED: Outcome.COMPLETED,
    pick_pb2.ReportRequest.EVENT_FAILED: Outcome.FAILED,
    pick_pb2.ReportRequest.EVENT_CANCELLED: Outcome.CANCELLED,
}


def read_form(request: pick_pb2.PickRequest, *, model: str, max_sequences: int) -> GenerationForm:
    """The request as the HTTP surface would see it. Raises: InvalidRequestError, UnknownModelError."""
    kind = request.WhichOneof("prompt")
    if kind == "chat_request_json":
        body = decode_body(request.chat_request_json.encode())
        return parse_form(Api.CHAT, body, model=model, max_sequences=max_sequences)
    body = {"model": request.model or None, "prompt": ""}
    named = parse_form(Api.COMPLETIONS, body, model=model, max_sequences=1)
    prompt: Prompt = OpaquePrompt(size_bytes=0)
    if kind == "text":
        prompt = TextPrompt(text=request.text)
    elif kind == "token_ids":
        prompt = TokenPrompt(token_ids=list(request.token_ids.ids))
    namespace = Namespace(
        model=model,
        lora_adapter=request.lora_adapter or named.namespace.lora_adapter,
        cache_salt=request.cache_salt or None,
    )
    limit = request.max_output_tokens if request.HasField("max_output_tokens") else None
    return GenerationForm(
        api=Api.COMPLETIONS, namespace=namespace, stream=False, prompt=prompt, max_output_tokens=limit
    )


class _Pick:
    """One reservation that waits for its report."""

    def __init__(self, reservation: Reservation, prompt: ReadPrompt, timer: asyncio.TimerHandle) -> None:
        self.reservation = reservation
        self.prompt = prompt
        self.timer = timer


class PickService(pick_pb2_grpc.PickerServicer):
    """Every Pick is ended by one Report, or by its time limit."""

    def __init__(
        self,
        *,
        pool: Pool,
        reader: PromptReader,
        relay: Relay,
        decisions: DecisionLog,
        keys: ApiKeys,
        model: str,
        times: TimeLimits,
        prefix_credit_s: float,
        max_sequences: int,
        why_not_serving: Callable[[], str],
    ) -> None:
        self._pool = pool
        self._reader = reader
        self._relay = relay
        self._decisions = decisions
        self._keys = keys
        self._model = model
        self._times = times
        self._prefix_credit_s = prefix_credit_s
        self._max_sequences = max_sequences
        self._why_not_serving = why_not_serving
        self._ids = RequestIds()
        self._picks: dict[str, _Pick] = {}

    @property
    def open_picks(self) -> int:
        """Picks without a final report."""
        return len(self._picks)

    async def Pick(self, request: pick_pb2.PickRequest, context: Context) -> pick_pb2.PickResponse:  # noqa: N802
        """Chooses and reserves; a caller that leaves meanwhile leaves nothing behind."""
        try:
            return await self._pick(request, context)
        except RouterError as error:
            await _abort(context, error)

    async def _pick(self, request: pick_pb2.PickRequest, context: Context) -> pick_pb2.PickResponse:
        self._authenticate(context)
        if reason := self._why_not_serving():
            raise NotReadyError(reason)
        form = read_form(request, model=self._model, max_sequences=self._max_sequences)
        prompt = await self._reader.read(form)
        routing = RoutingRequest(
            request_id=self._ids.next(),
            blocks=prompt.blocks,
            prompt_tokens=prompt.prompt_tokens,
            sequences=form.sequences,
            max_output_tokens=form.max_output_tokens,
        )
        reservation = await self._relay.place(routing)
        worker = self._pool.registry.get(reservation.worker)
        if worker is None:
            reservation.end(Outcome.FAILED)
            raise NotReadyError(f"worker {reservation.worker} went at the moment it was chosen")
        shown = self._decisions.add(reservation.decision)
        timer = asyncio.get_running_loop().call_later(self._times.pick_s, self._expire, routing.request_id)
        self._picks[routing.request_id] = _Pick(reservation, prompt, timer)
        return pick_pb2.PickResponse(
            request_id=routing.request_id,
            worker=reservation.worker,
            http_endpoint=worker.facts.endpoint,
            dp_rank=worker.facts.dp_rank,
            decision_json=shown.json.decode(),
        )

    async def Report(self, request: pick_pb2.ReportRequest, context: Context) -> pick_pb2.ReportResponse:  # noqa: N802
        """Takes a report. NOT_FOUND: unknown, already ended or expired; INVALID_ARGUMENT: no such event."""
        try:
            self._authenticate(context)
        except UnauthenticatedError as error:
            await _abort(context, error)
        pick = self._picks.get(request.request_id)
        if pick is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no open pick has the id {request.request_id!r}")
        if request.event == pick_pb2.ReportRequest.EVENT_FIRST_TOKEN:
            self._first_token(pick)
            return pick_pb2.ReportResponse()
        outcome = _OUTCOMES.get(request.event)
        if outcome is None:
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"event {request.event} is none of first token, completed, failed and cancelled",
            )
        self._end(request, pick, outcome)
        return pick_pb2.ReportResponse()

    def _first_token(self, pick: _Pick) -> None:
        pick.reservation.first_token()
        self._pool.prefilled(pick.reservation, pick.prompt)
        asyncio.get_running_loop().call_later(self._prefix_credit_s, self._end_credit, pick.reservation)

    def _end_credit(self, reservation: Reservation) -> None:
        if reservation.is_open:
            self._pool.stop_awaiting(reservation)
            reservation.prefix_arrived()

    def _end(self, request: pick_pb2.ReportRequest, pick: _Pick, outcome: Outcome) -> None:
        del self._picks[request.request_id]
        pick.timer.cancel()
        cached = request.cached_tokens if request.HasField("cached_tokens") else None
        output = request.output_tokens if request.HasField("output_tokens") else None
        self._pool.stop_awaiting(pick.reservation)
        pick.reservation.end(outcome, output_tokens=output, cached_tokens=cached)
        if outcome is Outcome.FAILED:
            self._pool.attempt_failed(pick.reservation.worker, "a gateway reported a failed request")
        elif outcome is Outcome.COMPLETED:
            self._pool.attempt_succeeded(pick.reservation.worker)
            self._pool.account(pick.reservation, reported_cached_tokens=cached, single=pick.prompt.exact)

    def _expire(self, request_id: str) -> None:
        pick = self._picks.pop(request_id)
        self._pool.stop_awaiting(pick.reservation)
        pick.reservation.end(Outcome.CANCELLED)

    def _authenticate(self, context: Context) -> None:
        if self._keys:
            metadata = dict(context.invocation_metadata() or ())
            self._keys.check(str(metadata.get("authorization", "")))


async def _abort(context: Context, error: RouterError) -> NoReturn:
    for kind, status in _STATUS:
        if isinstance(error, kind):
            await context.abort(status, error.message)
    await context.abort(grpc.StatusCode.INTERNAL, error.message)
    raise error  # abort has raised
