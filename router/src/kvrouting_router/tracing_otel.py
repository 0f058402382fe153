"""Spans by OpenTelemetry. Imported only when tracing is on: the SDK is heavy."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from kvrouting_core.routing.decision import Candidate, Decision
from kvrouting_router.tracing import AttemptTrace, RequestTrace

_CONTEXT = TraceContextTextMapPropagator()
_TERMS = tuple(Candidate.__annotations__)
_FLUSH_LIMIT_MS = 3000


class OtelAttemptTrace:
    """A client span; its id is what the engine's spans hang on."""

    def __init__(self, tracer: trace.Tracer, parent: Context, decision: Decision, endpoint: str) -> None:
        self._span = tracer.start_span(
            "attempt",
            context=parent,
            kind=SpanKind.CLIENT,
            attributes={
                "kvrouting.worker": decision.worker,
                "server.address": endpoint,
                "kvrouting.matched_tokens": decision.chosen.matched_tokens,
                "kvrouting.prediction_ms": decision.chosen.prediction_ms,
            },
        )
        carrier: dict[str, str] = {}
        _CONTEXT.inject(carrier, context=trace.set_span_in_context(self._span, parent))
        self.headers: Mapping[str, str] = carrier

    def end(self, *, status: int | None, error: str | None) -> None:
        """Ends the span."""
        _finish(self._span, status, error)


class OtelRequestTrace:
    """A server span below the caller's."""

    def __init__(self, tracer: trace.Tracer, parent: Context, path: str) -> None:
        self._tracer = tracer
        self._span = tracer.start_span(
            f"POST {path}",
            context=parent,
            kind=SpanKind.SERVER,
            attributes={"http.request.method": "POST", "url.path": path},
        )
        self._context = trace.set_span_in_context(self._span, parent)
        self._decide_span: trace.Span | None = None

    @contextmanager
    def tokenize(self) -> Iterator[None]:
        """Spans template, tokenizer and hash."""
        with self._tracer.start_as_current_span("tokenize", context=self._context):
            yield

    @contextmanager
    def decide(self) -> Iterator[None]:
        """Spans the wait for a decision."""
        with self._tracer.start_as_current_span("decide", context=self._context) as span:
            self._decide_span = span
            yield

    def decided(self, decision: Decision, /) -> None:
        """Each term as one list over all candidates: a span holds few attributes, a pool many workers."""
        span = self._decide_span
        if span is None:
            return
        span.set_attribute("kvrouting.worker", decision.worker)
        span.set_attribute("kvrouting.reason", decision.reason.value)
        span.set_attribute("kvrouting.policy", decision.policy)
        span.set_attribute("kvrouting.request_id", decision.request_id)
        span.set_attribute("kvrouting.waited_ms", decision.waited_ms)
        span.set_attribute("kvrouting.prompt_tokens", decision.prompt_tokens)
        if decision.waited_ms > 0:
            self._spanned_wait(span, decision.waited_ms)
        for term in _TERMS:
            span.set_attribute(f"kvrouting.candidates.{term}", [getattr(c, term) for c in decision.candidates])

    def _spanned_wait(self, decide: trace.Span, waited_ms: float) -> None:
        """The time in the router's own queue, as a child of the decision that ended it."""
        now_ns = time.time_ns()
        context = trace.set_span_in_context(decide)
        wait = self._tracer.start_span("wait", context=context, start_time=now_ns - round(waited_ms * 1e6))
        wait.end(now_ns)

    def attempt(self, decision: Decision, endpoint: str, /) -> AttemptTrace:
        """An attempt begins."""
        return OtelAttemptTrace(self._tracer, self._context, decision, endpoint)

    def end(self, *, status: int, error: str | None) -> None:
        """The answer is complete."""
        _finish(self._span, status, error)


def _finish(span: trace.Span, status: int | None, error: str | None) -> None:
    if status:
        span.set_attribute("http.response.status_code", status)
    if error:
        span.set_status(Status(StatusCode.ERROR, error))
    span.end()


class OtelTracer:
    """Owns the provider and its exporter."""

    def __init__(self, exporter: SpanExporter) -> None:
        service = os.environ.get("OTEL_SERVICE_NAME", "kvrouting-router")
        self._provider = TracerProvider(resource=Resource.create({SERVICE_NAME: service}))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("kvrouting_router")

    @classmethod
    def from_environment(cls) -> OtelTracer:
        """Exports as OTEL_EXPORTER_OTLP_* say, by gRPC. Raises: ValueError for another protocol."""
        protocol = os.environ.get(
            "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
        )
        if protocol != "grpc":
            raise ValueError(f"OTEL_EXPORTER_OTLP_PROTOCOL is {protocol!r}; this router exports by 'grpc'")
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        return cls(OTLPSpanExporter())

    def request(self, headers: Mapping[str, str], /, *, path: str) -> RequestTrace:
        """A server span, a child of the client's span if it sent one."""
        carrier = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
        return OtelRequestTrace(self._tracer, _CONTEXT.extract(carrier), path)

    def close(self) -> None:
        """Sends what is left, for a few seconds at most."""
        self._provider.force_flush(_FLUSH_LIMIT_MS)
        self._provider.shutdown()
