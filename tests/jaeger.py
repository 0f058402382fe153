"""A real Jaeger beside the tests, where its tool-kit lies beside the repository."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


def jaeger_binary() -> Path:
    """The tracing backend of the test tool-kit; skips without it."""
    tool = Path(__file__).resolve().parents[1].parent / "shared" / "k8s" / "cluster"
    if not tool.exists():
        pytest.skip(f"no tracing backend: {tool} does not exist")
    folder = subprocess.run([str(tool), "unpack"], check=True, capture_output=True, text=True).stdout.strip()
    binary = Path(folder) / "jaeger"
    if not binary.exists():
        if os.environ.get("CI") == "true":
            pytest.fail(f"{binary} is missing")
        pytest.skip(f"no tracing backend: {binary} does not exist")
    return binary


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(s.getsockname()[1]) for s in sockets]
    for s in sockets:
        s.close()
    return ports


JAEGER_CONFIG = """
service:
  extensions: [jaeger_storage, jaeger_query]
  pipelines: {{traces: {{receivers: [otlp], exporters: [jaeger_storage_exporter]}}}}
  telemetry: {{metrics: {{level: none}}}}
extensions:
  jaeger_storage: {{backends: {{main: {{memory: {{max_traces: 1000}}}}}}}}
  jaeger_query:
    storage: {{traces: main}}
    http: {{endpoint: "127.0.0.1:{query}"}}
    grpc: {{endpoint: "127.0.0.1:{query_grpc}"}}
receivers: {{otlp: {{protocols: {{grpc: {{endpoint: "127.0.0.1:{otlp}"}}}}}}}}
exporters: {{jaeger_storage_exporter: {{trace_storage: main}}}}
"""


@contextmanager
def running_jaeger(folder: Path) -> Iterator[tuple[str, str]]:
    """Jaeger in memory: its OTLP endpoint and its query URL."""
    binary = jaeger_binary()
    otlp, query, query_grpc = free_ports(3)
    file = folder / "jaeger.yaml"
    file.write_text(JAEGER_CONFIG.format(otlp=otlp, query=query, query_grpc=query_grpc))
    with (folder / "jaeger.log").open("wb") as log:
        process = subprocess.Popen([str(binary), "--config", str(file)], stdout=log, stderr=log)
    try:
        yield f"http://127.0.0.1:{otlp}", f"http://127.0.0.1:{query}"
    finally:
        process.kill()  # asked to stop, it first waits for a collector of its own traces that does not exist
        process.wait(10)


def trace_in(query: str, trace_id: str) -> dict[str, Any]:
    """The trace, waited for."""
    deadline = time.monotonic() + 30
    while True:
        try:
            with urllib.request.urlopen(f"{query}/api/traces/{trace_id}", timeout=2) as answer:
                data = json.load(answer)["data"]
                if data:
                    found: dict[str, Any] = data[0]
                    return found
        except OSError:
            pass
        if time.monotonic() > deadline:
            pytest.fail(f"trace {trace_id} did not appear in Jaeger")
        time.sleep(0.2)


def spans_of(query: str, trace_id: str) -> list[tuple[str, str, str | None, str]]:
    """(name, service, id of the parent span, its own id) of each span that has arrived so far."""
    try:
        with urllib.request.urlopen(f"{query}/api/traces/{trace_id}", timeout=5) as answer:
            traces = json.load(answer)["data"]
    except OSError:
        return []
    return [
        (
            span["operationName"],
            trace["processes"][span["processID"]]["serviceName"],
            next((r["spanID"] for r in span["references"] if r["refType"] == "CHILD_OF"), None),
            span["spanID"],
        )
        for trace in traces
        for span in trace["spans"]
    ]
