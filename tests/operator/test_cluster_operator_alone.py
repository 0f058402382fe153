"""Operators that begin and end, each alone on a real control plane: no other one may be at work beside them."""

from __future__ import annotations

import pytest

from kvrouting_operator.crd import CRD_NAME
from kvrouting_operator.observe import OWNED_KINDS
from kvrouting_operator.pool import Images
from kvrouting_operator.resources.names import POOL_LABEL
from tests.operator.kubernetes_under_test import Kubernetes, eventually, pool_path, running_operator
from tests.operator.test_cluster_operator import deployment, make, patch, pool_of, when

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("gpu_nodes")]


def test_a_new_operator_alone_replaces_no_pod(kube: Kubernetes, namespace: str) -> None:
    newer = Images(sglang="s:2", simulated="e:2", plugin="p:2", sidecar="sc:2", router="r:2")
    with running_operator(kube, namespaces=(namespace,)):
        make(kube, namespace)
        when(kube, namespace, "Ready", "True")
    before = [pod["metadata"]["uid"] for pod in kube.cluster.find("Pod", namespace)]
    with running_operator(kube, namespaces=(namespace,), images=newer):
        eventually(lambda: "rollout.trigger" in str(pool_of(kube, namespace)["status"]), what="word of the older pods")
        assert [pod["metadata"]["uid"] for pod in kube.cluster.find("Pod", namespace)] == before
        assert deployment(kube, namespace)["metadata"]["generation"] == 1
        patch(kube, namespace, {"rollout": {"trigger": "take it"}})
        when(kube, namespace, "Progressing", "False", "UpToDate")
        images = {c["image"] for c in deployment(kube, namespace)["spec"]["template"]["spec"]["containers"]}
        assert images == {"s:2"}


def test_an_operator_of_one_namespace_leaves_the_others_alone(kube: Kubernetes, namespace: str) -> None:
    other = namespace + "-other"
    kube.request("POST", "/api/v1/namespaces", {"metadata": {"name": other}})
    try:
        make(kube, other)
        make(kube, namespace)
        with running_operator(kube, namespaces=(namespace,)):
            when(kube, namespace, "Ready", "True")
        assert "status" not in pool_of(kube, other)
        assert kube.cluster.find("Deployment", other) == []
    finally:
        kube.delete(f"/api/v1/namespaces/{other}")


def test_pools_and_namespaces_go_with_the_operator_absent(kube: Kubernetes, namespace: str) -> None:
    with running_operator(kube, namespaces=(namespace,)):
        make(kube, namespace, "one")
        make(kube, namespace, "two")
        when(kube, namespace, "Ready", "True", name="one")
        when(kube, namespace, "Ready", "True", name="two")
    kube.delete(pool_path(namespace, "one"))

    def left() -> set[str]:
        return {
            o["metadata"]["labels"][POOL_LABEL]
            for kind in (*OWNED_KINDS, "Pod", "Secret")
            for o in kube.cluster.find(kind, namespace, selector=POOL_LABEL)
        }

    eventually(lambda: left() == {"two"}, what="nothing of the first pool")
    kube.delete(f"/api/v1/namespaces/{namespace}")
    eventually(lambda: kube.request("GET", f"/api/v1/namespaces/{namespace}")[0] == 404, what="the namespace's end")


def test_the_operator_brings_the_crd_up_to_its_own_version(kube: Kubernetes, namespace: str) -> None:
    path = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{CRD_NAME}"
    kube.request("PATCH", path, {"spec": {"names": {"shortNames": ["older"]}}}, query="fieldManager=helm")
    with running_operator(kube, namespaces=(namespace,)):
        _, crd = kube.request("GET", path)
    assert crd["spec"]["names"]["shortNames"] == ["kvp"]
