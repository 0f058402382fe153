"""The CRD on a real API server: what is taken and refused, defaults, what may not change, scale and status."""

from __future__ import annotations

from typing import Any

import pytest

from tests.operator.kubernetes_under_test import Kubernetes, manifest, pool_path
from tests.operator.pools import SMALLEST, raw_spec
from tests.operator.spec_table import ACCEPTED, REFUSED

pytestmark = pytest.mark.cluster

STRICT = "dryRun=All&fieldValidation=Strict"


@pytest.mark.parametrize("name", ACCEPTED)
def test_the_api_server_takes_it(kube: Kubernetes, name: str) -> None:
    status, answer = kube.request("POST", pool_path("default"), manifest("llama", ACCEPTED[name]), query=STRICT)
    assert status == 201, answer


@pytest.mark.parametrize("name", REFUSED)
def test_the_api_server_refuses_it_and_names_the_place(kube: Kubernetes, name: str) -> None:
    spec, words = REFUSED[name]
    status, answer = kube.request("POST", pool_path("default"), manifest("llama", spec), query=STRICT)
    assert status in (400, 422), answer
    assert words in answer["message"]


def test_defaults_are_written(kube: Kubernetes) -> None:
    _, answer = kube.request("POST", pool_path("default"), manifest("llama", SMALLEST), query=STRICT)
    spec = answer["spec"]
    assert spec["replicas"] == 1
    assert spec["engine"]["eviction"] == {"policy": "rlt-adaptive"}
    assert spec["rollout"] == {"maxSurge": 0, "maxUnavailable": 1, "trigger": ""}
    assert spec["router"]["service"]["port"] == 80


@pytest.mark.parametrize("name", ["Llama", "1llama", "a" * 41, "llama-", "my.llama"])
def test_a_name_that_no_service_can_have_is_refused(kube: Kubernetes, name: str) -> None:
    status, answer = kube.request("POST", pool_path("default"), manifest(name, SMALLEST), query=STRICT)
    assert status == 422, answer


FIXED: dict[str, tuple[dict[str, Any], str]] = {
    "model": ({"model": {"name": "other"}}, "model cannot be changed"),
    "served name": ({"model": {"servedName": "other"}}, "model cannot be changed"),
    "block size": ({"sidecar": {"blockSize": 32}}, "sidecar.blockSize cannot be changed"),
}


@pytest.mark.parametrize("name", FIXED)
def test_what_may_not_change_is_refused_with_the_reason(kube: Kubernetes, namespace: str, name: str) -> None:
    change, words = FIXED[name]
    kube.request("POST", pool_path(namespace), manifest("llama", SMALLEST))
    status, answer = kube.request("PATCH", pool_path(namespace, "llama"), {"spec": change})
    assert status == 422
    assert words in answer["message"]


def test_scale_and_status_are_apart_from_the_spec(kube: Kubernetes, namespace: str) -> None:
    kube.request("POST", pool_path(namespace), manifest("llama", SMALLEST))
    path = pool_path(namespace, "llama")
    status, scale = kube.request("PATCH", f"{path}/scale", {"spec": {"replicas": 3}})
    assert (status, scale["spec"]["replicas"]) == (200, 3)
    kube.request("PATCH", f"{path}/status", {"spec": {"replicas": 9}, "status": {"replicas": 2, "selector": "a=b"}})
    _, pool = kube.request("GET", path)
    assert (pool["spec"]["replicas"], pool["status"]["replicas"]) == (3, 2)
    _, scale = kube.request("GET", f"{path}/scale")
    assert scale["status"] == {"replicas": 2, "selector": "a=b"}


def test_an_old_field_of_the_pod_template_survives(kube: Kubernetes, namespace: str) -> None:
    template = {"spec": {"topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "zone"}]}}
    _, pool = kube.request("POST", pool_path(namespace), manifest("llama", raw_spec(podTemplate=template)))
    assert pool["spec"]["podTemplate"] == template
