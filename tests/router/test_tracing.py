"""Spans: one trace from the client to the engine; nothing of the SDK when tracing is off."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvrouting_router.tracing_otel import OtelTracer
from tests.fakes.fake_http_engine import Answer, running_engine
from tests.jaeger import running_jaeger, trace_in
from tests.router.router_under_test import chat, config, running_router

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = f"00-{TRACE}-00f067aa0ba902b7-01"


def by_name(spans: tuple[ReadableSpan, ...]) -> dict[str, list[ReadableSpan]]:
    named: dict[str, list[ReadableSpan]] = {}
    for span in spans:
        named.setdefault(span.name, []).append(span)
    return named


async def test_spans_hang_on_the_clients_and_the_engines_on_ours() -> None:
    exporter = InMemorySpanExporter()
    tracer = OtelTracer(exporter)
    async with (
        running_engine() as bad,
        running_engine() as good,
        running_router(config(policy="round_robin"), tracer=tracer) as router,
    ):
        bad.answer = lambda _: Answer(die_after=-1)
        await router.sidecar(bad, pod_uid="bad")
        await router.sidecar(good, pod_uid="good")
        headers = {"traceparent": PARENT, "tracestate": "vendor=1"}
        for _ in range(2):
            status, _, _ = await router.post("/v1/chat/completions", chat(), headers=headers)
            assert status == 200
        given = [{k.lower(): v for k, v in e.seen[0].headers.items()}["traceparent"] for e in (bad, good)]
        assert {k.lower(): v for k, v in good.seen[0].headers.items()}["tracestate"] == "vendor=1"
    spans = by_name(exporter.get_finished_spans())
    server = spans["POST /v1/chat/completions"]
    assert {f"{s.context.trace_id:032x}" for group in spans.values() for s in group if s.context} == {TRACE}
    assert {f"{s.parent.span_id:016x}" for s in server if s.parent} == {"00f067aa0ba902b7"}
    ids = {s.context.span_id for s in server if s.context}
    for name in ("tokenize", "decide", "attempt"):
        assert {s.parent.span_id for s in spans[name] if s.parent} <= ids
    attempts = {f"00-{TRACE}-{s.context.span_id:016x}-01" for s in spans["attempt"] if s.context}
    assert set(given) <= attempts
    assert len(spans["attempt"]) == 2 + len(bad.seen)
    failed = [s for s in spans["attempt"] if not s.status.is_ok and s.status.description]
    assert len(failed) == len(bad.seen)
    terms = spans["decide"][0].attributes
    assert terms is not None
    workers = terms["kvrouting.candidates.worker"]
    assert isinstance(workers, tuple)
    assert set(workers) == {"bad/0", "good/0"}
    cost = terms["kvrouting.candidates.cost_ms"]
    assert isinstance(cost, tuple)
    assert len(cost) == 2


async def test_a_rejected_request_ends_its_span_with_the_reason() -> None:
    exporter = InMemorySpanExporter()
    async with running_router(tracer=OtelTracer(exporter)) as router:
        await router.post("/v1/chat/completions", b"{")
    (span,) = exporter.get_finished_spans()
    assert "no JSON" in str(span.status.description)


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps what is exported to it."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.names += [s.name for r in request.resource_spans for scope in r.scope_spans for s in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()


@contextmanager
def collecting() -> Iterator[tuple[str, Collector]]:
    """A collector on a free port."""
    server, collector = grpc.server(ThreadPoolExecutor(2)), Collector()
    add_collector: Any = trace_service_pb2_grpc.add_TraceServiceServicer_to_server  # has no annotations
    add_collector(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"http://127.0.0.1:{port}", collector
    finally:
        server.stop(0).wait()


async def test_spans_reach_a_collector_by_otlp() -> None:
    with collecting() as (endpoint, collector):
        tracer = OtelTracer(OTLPSpanExporter(endpoint=endpoint, insecure=True))
        async with running_engine() as engine, running_router(tracer=tracer) as router:
            await router.sidecar(engine)
            await router.post("/v1/chat/completions", chat())
        assert sorted(collector.names) == ["POST /v1/chat/completions", "attempt", "decide", "tokenize"]


async def test_without_tracing_the_clients_context_still_reaches_the_engine() -> None:
    async with running_engine() as engine, running_router() as router:
        await router.sidecar(engine)
        await router.post("/v1/chat/completions", chat(), headers={"traceparent": PARENT})
        assert {k.lower(): v for k, v in engine.seen[0].headers.items()}["traceparent"] == PARENT


def test_without_tracing_no_sdk_is_imported() -> None:
    code = (
        "import sys, kvrouting_router.command, kvrouting_router.router_process\n"
        "print([m for m in sys.modules if m.startswith('opentelemetry')])"
    )
    output = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert output.strip() == "[]"


def test_another_protocol_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json")
    with pytest.raises(ValueError, match="http/json"):
        OtelTracer.from_environment()


@pytest.mark.processes
async def test_a_trace_is_found_in_jaeger(tmp_path: Path) -> None:
    loop = asyncio.get_running_loop()
    with running_jaeger(tmp_path) as (otlp, query):
        tracer = OtelTracer(OTLPSpanExporter(endpoint=otlp, insecure=True))
        async with running_engine() as engine, running_router(tracer=tracer) as router:
            await router.sidecar(engine)
            await router.post("/v1/chat/completions", chat(), headers={"traceparent": PARENT})
        trace = await loop.run_in_executor(None, trace_in, query, TRACE)
    names = sorted(s["operationName"] for s in trace["spans"])
    assert names == ["POST /v1/chat/completions", "attempt", "decide", "tokenize"]
    services = {p["serviceName"] for p in trace["processes"].values()}
    assert services == {"kvrouting-router"}
