"""Spans by OpenTelemetry, named as SGLang names them. Imported only when tracing is on: the SDK is heavy."""

from __future__ import annotations

import os

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import SpanKind
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from kvrouting_simulator.engine_process.generation import Generation
from kvrouting_simulator.engine_process.tracing import Served

_CONTEXT = TraceContextTextMapPropagator()
_FLUSH_LIMIT_MS = 3000


class OtelTracer:
    """Owns the provider and its exporter. The sampler is the SDK's own: by default the caller decides."""

    def __init__(self, exporter: SpanExporter) -> None:
        service = os.environ.get("OTEL_SERVICE_NAME", "kvrouting-engine")
        self._provider = TracerProvider(resource=Resource.create({SERVICE_NAME: service}))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("kvrouting_simulator")

    @classmethod
    def from_environment(cls) -> OtelTracer:
        """Exports as OTEL_EXPORTER_OTLP_* say, by gRPC. Raises: ValueError for another protocol."""
        protocol = os.environ.get(
            "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
        )
        if protocol != "grpc":
            raise ValueError(f"OTEL_EXPORTER_OTLP_PROTOCOL is {protocol!r}; this engine exports by 'grpc'")
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        return cls(OTLPSpanExporter())

    def served(self, request: Served, /) -> None:
        """A span for each answer, below the router's attempt, and below it its stages."""
        carrier = {name: request.headers[name] for name in ("traceparent", "tracestate") if name in request.headers}
        parent = _CONTEXT.extract(carrier)
        for generation in request.generations:
            self._answer(generation, parent, request.offset_s)

    def _answer(self, generation: Generation, parent: Context, offset_s: float) -> None:
        def at_ns(moment_s: float) -> int:
            return int((moment_s + offset_s) * 1e9)

        first_s, end_s = generation.first_token_s, generation.ended_s
        begin_ns = at_ns(generation.submitted_s)
        last_s = end_s or first_s or generation.submitted_s
        span = self._tracer.start_span(
            f"Req {generation.request_id[:8]}",
            context=parent,
            kind=SpanKind.SERVER,
            start_time=begin_ns,
            attributes={
                "rid": generation.request_id,
                "module": "kvrouting::engine",
                "kvrouting.prompt_tokens": generation.prompt_tokens,
                "kvrouting.cached_tokens": generation.cached_tokens,
                "kvrouting.output_tokens": len(generation.tokens),
                "kvrouting.finish": generation.finish or "lost",
            },
        )
        below = trace.set_span_in_context(span, parent)
        if first_s is not None:
            self._stage("prefill_forward", below, begin_ns, at_ns(first_s))
            self._stage("decode_loop", below, at_ns(first_s), at_ns(last_s))
        span.end(at_ns(last_s))

    def _stage(self, name: str, parent: Context, begin_ns: int, end_ns: int) -> None:
        self._tracer.start_span(name, context=parent, start_time=begin_ns).end(end_ns)

    def close(self) -> None:
        """Sends what is left, for a few seconds at most."""
        self._provider.force_flush(_FLUSH_LIMIT_MS)
        self._provider.shutdown()
