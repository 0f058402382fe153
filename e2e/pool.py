"""One KVRoutingPool on the cluster, as its user sees it."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from e2e.cluster import Cluster, Object, condition, eventually

MODEL = "simulated-llama"
CONDITIONS = (
    "Ready",
    "Progressing",
    "WorkersAvailable",
    "RouterAvailable",
    "EventsFlowing",
    "CacheSynced",
    "EvictionPolicyActive",
    "Draining",
)
GOOD = {kind: "False" if kind in ("Progressing", "Draining") else "True" for kind in CONDITIONS}
# Two cores start a dozen processes.
READY_S = 240.0


def simulated_pool(name: str, namespace: str, *, replicas: int, **spec: Any) -> Object:
    """The object of a pool with the simulated engine in the engine's place. spec: further fields."""
    engine = {"runtime": "simulated", **spec.pop("engine", {})}
    return {
        "apiVersion": "kvrouting.dev/v1alpha1",
        "kind": "KVRoutingPool",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "model": {"name": MODEL, "tokenizer": {"kind": "bytes"}},
            "gpu": {"class": "L40", "count": 0},
            "replicas": replicas,
            "drain": {"timeoutSeconds": 60},
            "engine": engine,
            **spec,
        },
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Pool:
    """name, namespace: of the KVRoutingPool."""

    cluster: Cluster
    name: str
    namespace: str

    def kubectl(self, *arguments: str) -> str:
        """kubectl in the pool's namespace."""
        return self.cluster.kubectl("--namespace", self.namespace, *arguments)

    def body(self) -> Object:
        """The live object."""
        body: Object = self.cluster.get("kvp", self.name, f"--namespace={self.namespace}")
        return body

    def patch(self, spec: Mapping[str, Any]) -> None:
        """Merges a change into the spec."""
        self.kubectl("patch", "kvp", self.name, "--type=merge", "--patch", json.dumps({"spec": spec}))

    def pods(self, component: str) -> list[Object]:
        """Worker or router pods that do not leave."""
        selector = f"kvrouting.dev/pool={self.name},app.kubernetes.io/component={component}"
        found = self.cluster.items("pods", f"--selector={selector}", f"--namespace={self.namespace}")
        return [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]

    def pod_names(self, component: str) -> set[str]:
        """Their names."""
        return {str(pod["metadata"]["name"]) for pod in self.pods(component)}

    def conditions(self) -> dict[str, str]:
        """Type → status, once the operator has seen the present spec; empty before."""
        body = self.body()
        if body.get("status", {}).get("observedGeneration") != body["metadata"]["generation"]:
            return {}
        return {c["type"]: c["status"] for c in body["status"]["conditions"]}

    def wait_until_good(self, *, workers: int) -> Object:
        """Returns the object once every condition is as it shall be and so many workers are ready."""

        def good() -> Object | None:
            body = self.body()
            ready = body.get("status", {}).get("readyReplicas")
            return body if self.conditions() == GOOD and ready == workers else None

        try:
            return eventually(f"pool {self.name} is good with {workers} workers", good, patience_s=READY_S)
        except AssertionError as error:
            status = json.dumps(self.body().get("status", {}), indent=1)
            raise AssertionError(f"{error}\n{status}\n{self.kubectl('get', 'pods', '--output=wide')}") from error

    def wait_for_condition(self, kind: str, status: str, *, patience_s: float = READY_S) -> Mapping[str, Any]:
        """Returns the condition once it has this status."""

        def has_status() -> Mapping[str, Any] | None:
            found = condition(self.body(), kind)
            return found if found.get("status") == status else None

        return eventually(f"{kind} of {self.name} is {status}", has_status, patience_s=patience_s)

    @contextmanager
    def router(self) -> Iterator[str]:
        """URL of the router's Service from here. It ends with the router pod behind it."""
        with self.cluster.forwarded(self.namespace, f"service/{self.name}-router", 80) as url:
            yield url

    def believed_workers(self, url: str) -> dict[str, Mapping[str, Any]]:
        """Pod name → what the router believes of it."""
        with urllib.request.urlopen(f"{url}/workers", timeout=10) as response:
            page = json.load(response)
        names = {pod["metadata"]["uid"]: pod["metadata"]["name"] for pod in self.pods("worker")}
        return {names.get(w["worker"].split("/")[0], w["worker"]): w for w in page["workers"]}


def chat(url: str, text: str, *, max_tokens: int = 8, headers: Mapping[str, str] | None = None) -> tuple[int, Any]:
    """Status and body of one chat request. headers: further ones."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": max_tokens}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode())
    for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
        request.add_header(name, value)
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def cached_tokens(answer: Mapping[str, Any]) -> int:
    """Of an answer's usage."""
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
