"""One trace from the caller to the engine, in a Jaeger pod."""

from __future__ import annotations

import json
import secrets
import urllib.request
from collections.abc import Mapping
from typing import Any

import pytest
import yaml

from e2e.cluster import Cluster, Object, eventually
from e2e.pool import Pool, chat, simulated_pool

_SPANS = {
    "p-router": {"POST /v1/chat/completions", "tokenize", "decide", "attempt"},
    "p-engine": {"Req", "prefill_forward", "decode_loop"},
}
_CONFIG = {
    "service": {
        "extensions": ["jaeger_storage", "jaeger_query"],
        "pipelines": {"traces": {"receivers": ["otlp"], "exporters": ["jaeger_storage_exporter"]}},
        "telemetry": {"metrics": {"level": "none"}},
    },
    "extensions": {
        "jaeger_storage": {"backends": {"main": {"memory": {"max_traces": 1000}}}},
        "jaeger_query": {
            "storage": {"traces": "main"},
            "http": {"endpoint": "0.0.0.0:16686"},
            "grpc": {"endpoint": "127.0.0.1:16685"},
        },
    },
    "receivers": {"otlp": {"protocols": {"grpc": {"endpoint": "0.0.0.0:4317"}}}},
    "exporters": {"jaeger_storage_exporter": {"trace_storage": "main"}},
}


def _jaeger(cluster: Cluster, namespace: str) -> list[Object]:
    metadata = {"name": "jaeger", "namespace": namespace, "labels": {"app": "jaeger"}}
    container = {
        "name": "jaeger",
        "image": cluster.images.jaeger,
        "args": ["--config=/etc/jaeger/jaeger.yaml"],
        "ports": [{"containerPort": port, "protocol": "TCP"} for port in (4317, 16686)],
        "readinessProbe": {"tcpSocket": {"port": 4317}, "periodSeconds": 1},
        "volumeMounts": [{"name": "config", "mountPath": "/etc/jaeger"}],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    pod = {
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": 0,
        "securityContext": {"runAsNonRoot": True, "runAsUser": 65532, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [container],
        "volumes": [{"name": "config", "configMap": {"name": "jaeger"}}],
    }
    ports = [{"name": name, "port": port, "protocol": "TCP"} for name, port in (("otlp", 4317), ("query", 16686))]
    service = {"selector": {"app": "jaeger"}, "ports": ports}
    return [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"jaeger.yaml": yaml.dump(_CONFIG)}},
        {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod},
        {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": service},
    ]


def _trace(url: str, trace_id: str) -> Mapping[str, Any]:
    with urllib.request.urlopen(f"{url}/api/traces/{trace_id}", timeout=10) as response:
        found: Mapping[str, Any] = json.load(response)["data"][0]
    return found


def _spans_by_service(trace: Mapping[str, Any]) -> dict[str, dict[str, Mapping[str, Any]]]:
    """Spans by service and name: the engine numbers its own ("Req 12"), the number is left out."""
    spans: dict[str, dict[str, Mapping[str, Any]]] = {}
    for span in trace["spans"]:
        service = trace["processes"][span["processID"]]["serviceName"]
        name = span["operationName"]
        spans.setdefault(service, {})[name.split(" ")[0] if service == "p-engine" else name] = span
    return spans


def _parents(span: Mapping[str, Any]) -> set[str]:
    return {reference["spanID"] for reference in span["references"]}


def test_a_request_is_one_trace_through_router_and_engine(cluster: Cluster, namespace: str) -> None:
    if not cluster.images.jaeger:
        pytest.skip("set KVROUTING_E2E_JAEGER_IMAGE to an image of Jaeger 2")
    pool = Pool(cluster=cluster, name="p", namespace=namespace)
    tracing = {"endpoint": f"http://jaeger.{namespace}.svc:4317", "engine": True}
    cluster.apply(*_jaeger(cluster, namespace), simulated_pool(pool.name, namespace, replicas=1, tracing=tracing))
    pool.wait_until_good(workers=1)
    pool.kubectl("wait", "pod/jaeger", "--for=condition=Ready", "--timeout=120s")

    trace_id, caller = secrets.token_hex(16), secrets.token_hex(8)
    with pool.router() as url:
        status, answer = chat(url, "follow me", headers={"traceparent": f"00-{trace_id}-{caller}-01"})
    assert status == 200, answer

    with cluster.forwarded(namespace, "service/jaeger", 16686) as url:

        def complete() -> dict[str, dict[str, Mapping[str, Any]]] | None:
            try:
                spans = _spans_by_service(_trace(url, trace_id))
            except OSError:
                return None
            # Each process exports its spans in batches: those of one request may come in several.
            arrived = all(names <= set(spans.get(service, ())) for service, names in _SPANS.items())
            return spans if arrived else None

        spans = eventually("every span of router and engine is in one trace", complete, patience_s=60)

    assert {service: set(named) for service, named in spans.items()} == _SPANS
    routers, engines = spans["p-router"], spans["p-engine"]
    assert _parents(routers["POST /v1/chat/completions"]) == {caller}
    assert _parents(routers["attempt"]) == {routers["POST /v1/chat/completions"]["spanID"]}
    assert _parents(engines["Req"]) == {routers["attempt"]["spanID"]}
    assert _parents(engines["decode_loop"]) == {engines["Req"]["spanID"]}
