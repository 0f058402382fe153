"""The operator on a real control plane; nodes are without machines, and pods on them run at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kvrouting_operator.crd import KIND
from kvrouting_operator.observe import OWNED_KINDS
from kvrouting_operator.pool import Object
from kvrouting_operator.resources.names import COMPONENT_LABEL, POOL_LABEL, WORKER
from tests.operator.kubernetes_under_test import (
    Kubernetes,
    RunningOperator,
    conditions,
    eventually,
    manifest,
    pool_path,
    running_operator,
)
from tests.operator.pools import SIMULATED, SMALLEST, raw_spec, report_of

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("gpu_nodes")]


@pytest.fixture(scope="module")
def operator(kube: Kubernetes) -> Iterator[RunningOperator]:
    """One for all tests of this module."""
    with running_operator(kube) as running:
        yield running


def make(kube: Kubernetes, namespace: str, name: str = "llama", **changes: Any) -> None:
    """A pool, as a user makes it."""
    status, answer = kube.request("POST", pool_path(namespace), manifest(name, raw_spec(**changes)))
    assert status == 201, answer


def patch(kube: Kubernetes, namespace: str, spec: dict[str, Any], name: str = "llama") -> None:
    """As a user edits it."""
    status, answer = kube.request("PATCH", pool_path(namespace, name), {"spec": spec})
    assert status == 200, answer


def pool_of(kube: Kubernetes, namespace: str, name: str = "llama") -> Object:
    """As it is now."""
    return kube.cluster.get(KIND, namespace, name) or {}


def when(kube: Kubernetes, namespace: str, kind: str, status: str, reason: str = "", *, name: str = "llama") -> Object:
    """The pool, when a condition says so."""

    def find() -> Object | None:
        pool = pool_of(kube, namespace, name)
        held = conditions(pool).get(kind, ("", ""))
        settled = pool.get("status", {}).get("observedGeneration") == pool.get("metadata", {}).get("generation")
        return pool if settled and held[0] == status and reason in ("", held[1]) else None

    return eventually(find, what=f"{kind}={status} {reason}, last: {conditions(pool_of(kube, namespace, name))}")


def message_of(pool: Object, kind: str) -> str:
    """Of a condition."""
    return str(next(c["message"] for c in pool["status"]["conditions"] if c["type"] == kind))


def workers(kube: Kubernetes, namespace: str, pool: str = "llama") -> list[Object]:
    """Worker pods of a pool that stay."""
    pods = kube.cluster.find("Pod", namespace, selector=f"{POOL_LABEL}={pool},{COMPONENT_LABEL}={WORKER}")
    return [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]


def deployment(kube: Kubernetes, namespace: str, name: str = "llama-worker") -> Object:
    """One of the two."""
    found = kube.cluster.get("Deployment", namespace, name)
    assert found is not None
    return found


def test_a_pool_becomes_ready_and_rests(kube: Kubernetes, operator: RunningOperator, namespace: str) -> None:
    make(kube, namespace, replicas=2)
    when(kube, namespace, "Ready", "True")
    pool = when(kube, namespace, "Progressing", "False", "UpToDate")
    under_way = {kind: status for kind, (status, _) in conditions(pool).items() if status != "True"}
    assert under_way == {"Progressing": "False", "Draining": "False"}
    assert [w["phase"] for w in pool["status"]["workers"]] == ["Ready", "Ready"]
    assert "finalizers" not in pool["metadata"]
    assert not any("kopf" in name for name in pool["metadata"].get("annotations", {}))
    before = {kind: kube.cluster.find(kind, namespace) for kind in OWNED_KINDS}
    patch(kube, namespace, {"drain": {"timeoutSeconds": 300}})
    assert {kind: kube.cluster.find(kind, namespace) for kind in OWNED_KINDS} == before
    assert operator.probe("healthz") == 200


def test_each_class_lands_on_its_own_nodes(kube: Kubernetes, operator: RunningOperator, namespace: str) -> None:
    make(kube, namespace, "small", replicas=3)
    make(kube, namespace, "large", replicas=2, gpu={"class": "H200", "count": 4})
    when(kube, namespace, "Ready", "True", name="small")
    when(kube, namespace, "Ready", "True", name="large")
    nodes = {name: {p["spec"]["nodeName"] for p in workers(kube, namespace, name)} for name in ("small", "large")}
    assert nodes["small"] <= {"l40-a", "l40-b"}
    assert nodes["large"] == {"h200-a"}
    assert {p["metadata"]["labels"][POOL_LABEL] for p in workers(kube, namespace, "small")} == {"small"}


def test_why_a_pod_waits_for_a_node_is_in_status(kube: Kubernetes, operator: RunningOperator, namespace: str) -> None:
    make(kube, namespace, gpu={"class": "L40S"})
    pool = when(kube, namespace, "WorkersAvailable", "False", "Unschedulable")
    (worker,) = pool["status"]["workers"]
    assert (worker["phase"], worker["reason"]) == ("Pending", "Unschedulable")
    assert "node affinity/selector" in worker["message"]
    patch(kube, namespace, {"gpu": {"class": "L40"}})
    when(kube, namespace, "Ready", "True")


def test_a_quota_is_named(kube: Kubernetes, operator: RunningOperator, namespace: str) -> None:
    quota = {"metadata": {"name": "few-gpus"}, "spec": {"hard": {"requests.nvidia.com/gpu": "1"}}}
    kube.request("POST", f"/api/v1/namespaces/{namespace}/resourcequotas", quota)
    eventually(
        lambda: (
            kube.request("GET", f"/api/v1/namespaces/{namespace}/resourcequotas/few-gpus")[1]
            .get("status", {})
            .get("hard")
        ),
        what="the quota",
    )
    make(kube, namespace, replicas=2)
    pool = when(kube, namespace, "WorkersAvailable", "False", "QuotaExceeded")
    message = message_of(pool, "WorkersAvailable")
    assert "few-gpus" in message


def test_scaling_takes_the_coldest_worker_first(kube: Kubernetes, operator: RunningOperator, namespace: str) -> None:
    make(kube, namespace, replicas=1)
    when(kube, namespace, "Ready", "True")
    kube.request("PATCH", f"{pool_path(namespace, 'llama')}/scale", {"spec": {"replicas": 4}})
    when(kube, namespace, "Ready", "True")
    names = [pod["metadata"]["name"] for pod in workers(kube, namespace)]
    assert len(names) == 4
    warm = names[1]
    operator.routers.reports.update({name: report_of(in_flight=0, unique_cached_tokens=3) for name in names})
    operator.routers.reports[warm] = report_of(in_flight=5)
    eventually(lambda: _in_flight(kube, namespace).get(warm) == 5, what="the load in status")
    patch(kube, namespace, {"replicas": 1})
    eventually(lambda: len(workers(kube, namespace)) == 1, what="one worker")
    assert [pod["metadata"]["name"] for pod in workers(kube, namespace)] == [warm]


def _in_flight(kube: Kubernetes, namespace: str) -> dict[str, int]:
    return {w["pod"]: w.get("inFlight", 0) for w in pool_of(kube, namespace)["status"]["workers"]}


def test_no_workers_and_back(kube: Kubernetes, operator: RunningOperator, namespace: str) -> None:
    make(kube, namespace)
    when(kube, namespace, "Ready", "True")
    patch(kube, namespace, {"replicas": 0})
    when(kube, namespace, "Ready", "False", "ScaledToZero")
    eventually(lambda: not workers(kube, namespace), what="no worker")
    patch(kube, namespace, {"replicas": 1})
    when(kube, namespace, "Ready", "True")


def test_a_pod_template_that_would_break_the_pool_is_a_condition(
    kube: Kubernetes, operator: RunningOperator, namespace: str
) -> None:
    make(kube, namespace, podTemplate={"spec": {"hostNetwork": True}})
    pool = when(kube, namespace, "Progressing", "False", "InvalidSpec")
    assert "podTemplate.spec.hostNetwork" in message_of(pool, "Progressing")
    assert kube.cluster.get("Deployment", namespace, "llama-worker") is None
    repaired = {"hostNetwork": None, "priorityClassName": "system-node-critical"}
    patch(kube, namespace, {"podTemplate": {"spec": repaired}})
    when(kube, namespace, "Progressing", "False", "UpToDate")


def test_a_field_that_no_pod_has_is_told_in_the_servers_words(
    kube: Kubernetes, operator: RunningOperator, namespace: str
) -> None:
    make(kube, namespace, podTemplate={"spec": {"priorityClas": "x"}})
    pool = when(kube, namespace, "Progressing", "False", "Rejected")
    assert "priorityClas" in message_of(pool, "Progressing")


def test_a_users_field_is_not_forced_over(kube: Kubernetes, operator: RunningOperator, namespace: str) -> None:
    make(kube, namespace)
    when(kube, namespace, "Ready", "True")
    path = f"/apis/apps/v1/namespaces/{namespace}/deployments/llama-router"
    kube.request("PATCH", path, {"spec": {"replicas": 3}}, query="fieldManager=somebody")
    pool = when(kube, namespace, "Progressing", "False", "FieldConflict")
    message = message_of(pool, "Progressing")
    assert "somebody" in message
    assert ".spec.replicas" in message
    assert deployment(kube, namespace, "llama-router")["spec"]["replicas"] == 3


def test_an_object_of_another_owner_is_left_alone(kube: Kubernetes, operator: RunningOperator, namespace: str) -> None:
    service = {"metadata": {"name": "llama-router"}, "spec": {"ports": [{"port": 1}], "selector": {"mine": "yes"}}}
    kube.request("POST", f"/api/v1/namespaces/{namespace}/services", service)
    make(kube, namespace)
    when(kube, namespace, "Progressing", "False", "NameTaken")
    found = kube.cluster.get("Service", namespace, "llama-router") or {}
    assert found["spec"]["selector"] == {"mine": "yes"}
    assert "ownerReferences" not in found["metadata"]


def test_changes_are_events(kube: Kubernetes, operator: RunningOperator, namespace: str) -> None:
    make(kube, namespace)
    when(kube, namespace, "Ready", "True")
    (pod,) = workers(kube, namespace)
    operator.routers.reports[pod["metadata"]["name"]] = report_of(eviction_policy="lru")
    when(kube, namespace, "EvictionPolicyActive", "False", "OtherPolicy")

    def told() -> set[tuple[str, str]]:
        events = kube.cluster.find("Event", namespace)
        return {(e["type"], e["reason"]) for e in events if e["involvedObject"]["kind"] == KIND}

    eventually(lambda: ("Warning", "OtherPolicy") in told(), what="the event")
    assert ("Normal", "Ready") in told()


def test_a_service_of_a_pool_leads_to_unready_routers_while_none_is_ready(
    kube: Kubernetes, operator: RunningOperator, namespace: str
) -> None:
    make(kube, namespace)
    when(kube, namespace, "Ready", "True")

    def settled() -> bool:
        service = kube.cluster.get("Service", namespace, "llama-router") or {}
        return not service["spec"].get("publishNotReadyAddresses")

    eventually(settled, what="ready routers alone")


def test_fifty_pools_at_once(kube: Kubernetes, operator: RunningOperator, namespace: str) -> None:
    names = [f"p{number}" for number in range(50)]
    for name in names:
        spec = raw_spec(SIMULATED, replicas=1, router={"resources": {"requests": {"cpu": "10m"}}})
        kube.request("POST", pool_path(namespace), manifest(name, spec))

    def ready() -> bool:
        pools = kube.cluster.find(KIND, namespace)
        return sum(conditions(pool).get("Ready", ("", ""))[0] == "True" for pool in pools) == len(names)

    eventually(ready, what="fifty pools", limit_s=150)
    uids = {pool["metadata"]["name"]: pool["metadata"]["uid"] for pool in kube.cluster.find(KIND, namespace)}
    for body in kube.cluster.find("Deployment", namespace):
        (owner,) = body["metadata"]["ownerReferences"]
        assert owner["uid"] == uids[body["metadata"]["labels"][POOL_LABEL]]
    assert operator.probe("healthz") == 200


def guard(kube: Kubernetes, namespace: str, level: str) -> None:
    """Pod Security is enforced in the namespace."""
    labels = {"pod-security.kubernetes.io/enforce": level}
    kube.request("PATCH", f"/api/v1/namespaces/{namespace}", {"metadata": {"labels": labels}})


def test_a_simulated_pool_passes_pod_security_restricted(
    kube: Kubernetes, operator: RunningOperator, namespace: str
) -> None:
    guard(kube, namespace, "restricted")
    status, answer = kube.request("POST", pool_path(namespace), manifest("llama", raw_spec(SIMULATED)))
    assert status == 201, answer
    when(kube, namespace, "Ready", "True")


def test_sglang_passes_baseline_and_what_restricted_asks_of_it_is_in_status(
    kube: Kubernetes, operator: RunningOperator, namespace: str
) -> None:
    guard(kube, namespace, "restricted")
    make(kube, namespace)
    pool = when(kube, namespace, "WorkersAvailable", "False", "FailedCreate")
    message = message_of(pool, "WorkersAvailable")
    assert 'violates PodSecurity "restricted' in message
    assert 'container "engine" must set securityContext.runAsNonRoot' in message.replace("containers", "container")
    guard(kube, namespace, "baseline")
    # The Deployment's own retries have backed off by now: a change makes it try again at once.
    patch(kube, namespace, {"replicas": 2})
    when(kube, namespace, "Ready", "True")


def test_what_a_user_wrote_is_the_spec_alone(kube: Kubernetes, operator: RunningOperator, namespace: str) -> None:
    make(kube, namespace)
    pool = when(kube, namespace, "Ready", "True")
    assert pool["spec"]["model"]["name"] == SMALLEST["model"]["name"]
    managers = {entry["manager"]: entry for entry in pool["metadata"]["managedFields"]}
    assert set(managers["kvrouting-operator"]["fieldsV1"]) == {"f:status"}
