"""Pools, pods and reports for the operator's tests."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from kvrouting_operator.crd import API_VERSION, KIND
from kvrouting_operator.observed import Observed
from kvrouting_operator.plan import Plan, plan
from kvrouting_operator.pool import Images, Object, PoolIdentity, PoolKey, PoolKeys, parse_spec
from kvrouting_operator.resources.names import COMPONENT_LABEL, POOL_LABEL, ROUTER, WORKER
from kvrouting_operator.router_report import PoolReport, WorkerReport
from kvrouting_operator.spec import PoolSpec

IMAGES = Images(sglang="sglang:1", simulated="simulated:1", plugin="plugin:1", sidecar="sidecar:1", router="router:1")
KEYS = PoolKeys(hash_key="ab" * 32, join_token="join", drain_token="drain")
NOW = "2030-01-01T00:00:00Z"

SMALLEST: Mapping[str, Any] = {"model": {"name": "meta-llama/Llama-3.1-8B"}, "gpu": {"class": "L40"}}
SIMULATED: Mapping[str, Any] = {
    "model": {"name": "simulated-llama", "tokenizer": {"kind": "bytes"}},
    "gpu": {"class": "L40", "count": 0},
    "engine": {"runtime": "simulated"},
}


def raw_spec(base: Mapping[str, Any] = SMALLEST, **changes: Any) -> dict[str, Any]:
    """The base with changes merged over it, field by field."""
    return _over(copy.deepcopy(dict(base)), changes)


def _over(base: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    for name, value in changes.items():
        held = base.get(name)
        if isinstance(held, dict) and isinstance(value, Mapping):
            base[name] = _over(held, value)
        else:
            base[name] = copy.deepcopy(value)
    return base


def spec_of(base: Mapping[str, Any] = SMALLEST, **changes: Any) -> PoolSpec:
    """Parsed."""
    return parse_spec(raw_spec(base, **changes))


def raw_pool(
    name: str = "llama", namespace: str = "default", spec: Mapping[str, Any] = SMALLEST, **more: Any
) -> Object:
    """A pool as the API server would hold it."""
    metadata = {"name": name, "namespace": namespace, "uid": f"uid-{namespace}-{name}", "generation": 1}
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "spec": copy.deepcopy(dict(spec)), **more}


def identity_of(name: str = "llama", namespace: str = "default") -> PoolIdentity:
    """The identity of that pool."""
    return PoolIdentity(key=PoolKey(namespace=namespace, name=name), uid=f"uid-{namespace}-{name}", generation=1)


def observed_of(name: str = "llama", namespace: str = "default", **parts: Any) -> Observed:
    """What is seen of a pool; nothing unless it is given."""
    given: dict[str, Any] = {"raw": raw_pool(name, namespace), "keys": KEYS, "native_sidecar": True, **parts}
    return Observed(identity=identity_of(name, namespace), **given)


def planned(spec: PoolSpec, observed: Observed | None = None, *, images: Images = IMAGES) -> Plan:
    """The plan with the test's keys and images."""
    return plan(spec, observed or observed_of(), keys=KEYS, images=images)


def objects_of(
    spec: PoolSpec, observed: Observed | None = None, *, images: Images = IMAGES
) -> dict[tuple[str, str], Object]:
    """(kind, name) → object of the plan."""
    objects = planned(spec, observed, images=images).objects
    return {(o["kind"], o["metadata"]["name"]): o for o in objects}


def worker_pod_of(spec: PoolSpec, name: str = "llama") -> Object:
    """The pod template of the workers."""
    template: Object = objects_of(spec, observed_of(name))["Deployment", f"{name}-worker"]["spec"]["template"]
    return template


def router_pod_of(spec: PoolSpec, name: str = "llama") -> Object:
    """The pod template of the routers."""
    template: Object = objects_of(spec, observed_of(name))["Deployment", f"{name}-router"]["spec"]["template"]
    return template


def container(pod: Mapping[str, Any], name: str) -> Object:
    """A container of a pod, wherever it is. Raises: StopIteration if there is none."""
    spec = pod["spec"]
    found: Object = next(c for c in [*spec.get("initContainers", []), *spec["containers"]] if c["name"] == name)
    return found


def live_pod(name: str, *, component: str = WORKER, ready: bool = True, pool: str = "llama", **status: Any) -> Object:
    """A pod that runs; status fields replace those of a running one."""
    kinds = {WORKER: ["engine", "sidecar"], ROUTER: ["router"]}[component]
    containers = [{"name": n, "ready": ready, "started": True, "state": {"running": {}}} for n in kinds]
    held = {
        "phase": "Running",
        "podIP": "10.0.0.1",
        "conditions": [{"type": "Ready", "status": "True" if ready else "False"}],
        "containerStatuses": containers,
        **status,
    }
    labels = {POOL_LABEL: pool, COMPONENT_LABEL: component}
    metadata = {"name": name, "namespace": "default", "uid": f"uid-{name}", "labels": labels}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"nodeName": "node-a"}, "status": held}


def report_of(**changes: Any) -> WorkerReport:
    """A worker in the best state."""
    best: dict[str, Any] = {
        "state": "live",
        "reason": "",
        "epoch": "e1",
        "mirror": "exact",
        "cached_tokens": 1000,
        "unique_cached_tokens": 500,
        "capacity_tokens": 197_000,
        "in_flight": 0,
        "sync_lag_s": 0.1,
        "eviction_policy": "rlt-adaptive",
        "eviction_live": True,
        "events_flowing": True,
    }
    return WorkerReport(**{**best, **changes})


def pool_report(**workers: WorkerReport) -> PoolReport:
    """Pod name → report, of one router that answered. Dashes in names are written as underscores."""
    return PoolReport(answered=1, workers={f"uid-{name.replace('_', '-')}": r for name, r in workers.items()})


def live_deployment(
    body: Mapping[str, Any], *, replicas: int, updated: int | None = None, generation: int = 1
) -> Object:
    """A Deployment of a plan as the API server holds it when its pods are up."""
    updated = replicas if updated is None else updated
    status = {
        "observedGeneration": generation,
        "replicas": replicas,
        "updatedReplicas": updated,
        "readyReplicas": replicas,
    }
    metadata = {**body["metadata"], "generation": generation, "uid": "uid-deployment"}
    return {**copy.deepcopy(dict(body)), "metadata": metadata, "status": status}
