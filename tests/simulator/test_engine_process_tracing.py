"""Spans of the simulated engine: below the caller's, by OTLP, as the standard variables say."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from click.testing import CliRunner
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from kvrouting_simulator.engine_process.command import engine
from tests.simulator.engine_under_test import running_engine

TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED, UNSAMPLED = f"00-{TRACE}-{CALLER}-01", f"00-{'ab' * 16}-{CALLER}-00"


@dataclass
class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps what is exported to it. services: names of those that sent."""

    spans: list[Any] = field(default_factory=list)
    services: set[str] = field(default_factory=set)

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802
        for of_resource in request.resource_spans:
            attributes = {a.key: a.value.string_value for a in of_resource.resource.attributes}
            self.services.add(attributes["service.name"])
            self.spans += [span for scope in of_resource.scope_spans for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()


@contextmanager
def collecting() -> Iterator[tuple[str, Collector]]:
    """A collector on a free port, and its endpoint."""
    server, collector = grpc.server(ThreadPoolExecutor(2)), Collector()
    add_collector: Any = trace_service_pb2_grpc.add_TraceServiceServicer_to_server  # has no annotations
    add_collector(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"http://127.0.0.1:{port}", collector
    finally:
        server.stop(0).wait()


async def test_every_answer_is_a_span_below_its_callers_with_its_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    with collecting() as (endpoint, collector):
        monkeypatch.setenv("KVROUTING_ENGINE_TRACING", "true")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        monkeypatch.setenv("OTEL_SERVICE_NAME", "p-engine")
        async with running_engine("--tracing") as engine:
            body = {"model": "simulated-llama", "prompt": "a prefix", "max_tokens": 3}
            await engine.post("/v1/completions", body, headers={"traceparent": SAMPLED})
            await engine.post("/v1/completions", body, headers={"traceparent": UNSAMPLED})
            await engine.post("/v1/completions", {**body, "max_tokens": 0}, status=400)
            await engine.get("/health")

    assert collector.services == {"p-engine"}
    assert {span.trace_id.hex() for span in collector.spans} == {TRACE}
    (answer,) = (span for span in collector.spans if span.name.startswith("Req "))
    stages = {span.name: span for span in collector.spans if span is not answer}
    assert answer.parent_span_id.hex() == CALLER
    assert set(stages) == {"prefill_forward", "decode_loop"}
    assert {span.parent_span_id for span in stages.values()} == {answer.span_id}
    prefill, decode = stages["prefill_forward"], stages["decode_loop"]
    assert answer.start_time_unix_nano == prefill.start_time_unix_nano < prefill.end_time_unix_nano
    assert prefill.end_time_unix_nano == decode.start_time_unix_nano < decode.end_time_unix_nano
    told = {a.key: a.value.int_value for a in answer.attributes if a.value.HasField("int_value")}
    assert told == {"kvrouting.prompt_tokens": 8, "kvrouting.cached_tokens": 0, "kvrouting.output_tokens": 3}


def test_a_protocol_that_is_not_spoken_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json")
    result = CliRunner().invoke(engine, ["--tracing", "--port", "0"])
    assert result.exit_code != 0
    assert "OTEL_EXPORTER_OTLP_PROTOCOL is 'http/json'; this engine exports by 'grpc'" in result.output


def test_without_tracing_the_sdk_is_not_even_loaded() -> None:
    code = (
        "import sys, kvrouting_simulator.engine_process.server; print([m for m in sys.modules if 'opentelemetry' in m])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
