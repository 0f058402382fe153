"""The chart without a cluster: linted, rendered, and in step with the operator."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvrouting_operator.pool import parse_spec
from kvrouting_operator.rbac import cluster_rules, pool_rules
from kvrouting_operator.spec.gpu import GPU_DEFAULTS

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "helm/kvrouting"
KIT = ROOT.parent / "shared/k8s/cluster"
SCENARIOS = sorted(CHART.glob("ci/*-values.yaml"))
Object = dict[str, Any]


@pytest.fixture(scope="session")
def helm() -> str:
    """The program, of the machine or of the tool-kit."""
    found = shutil.which("helm")
    if found is None and KIT.exists():
        unpacked = subprocess.run([str(KIT), "unpack"], capture_output=True, text=True, check=True).stdout.strip()
        found = f"{unpacked}/helm"
    if found is None:
        if os.environ.get("CI") == "true" and KIT.exists():
            pytest.fail("helm is not there")
        pytest.skip("helm is not installed")
    return found


def _helm(helm: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([helm, *arguments], capture_output=True, text=True, check=False)


def _rendered(helm: str, *options: str) -> list[Object]:
    done = _helm(helm, "template", "release", str(CHART), "--namespace=pools", "--include-crds", *options)
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.safe_load_all(done.stdout) if document]


def _of_kind(objects: list[Object], kind: str) -> list[Object]:
    return [body for body in objects if body["kind"] == kind]


@pytest.mark.parametrize("values", SCENARIOS, ids=lambda path: path.name.removesuffix("-values.yaml"))
def test_every_scenario_is_linted_and_its_pools_are_what_the_operator_takes(helm: str, values: Path) -> None:
    linted = _helm(helm, "lint", str(CHART), "--strict", "--values", str(values))
    assert linted.returncode == 0, linted.stdout + linted.stderr

    objects = _rendered(helm, "--values", str(values))

    wished = yaml.safe_load(values.read_text()) or {}
    pools = {pool["metadata"]["name"]: pool["spec"] for pool in _of_kind(objects, "KVRoutingPool")}
    assert set(pools) == set(wished.get("pools", {}))
    for name, spec in pools.items():
        parsed = parse_spec(spec)
        assert parsed.model.name == wished["pools"][name]["spec"]["model"]["name"]
    assert len(
        {(body["kind"], body["metadata"]["name"], body["metadata"].get("namespace")) for body in objects}
    ) == len(objects)


@pytest.mark.parametrize("name", ["L40", "H200"])
def test_a_preset_says_what_its_class_brings(name: str) -> None:
    preset = yaml.safe_load((CHART / "values.yaml").read_text())["presets"][name]["spec"]
    written = parse_spec({"model": {"name": "m"}, **preset})
    bare = parse_spec({"model": {"name": "m"}, "gpu": {"class": name}})

    assert written.gpu.selected_nodes == bare.gpu.selected_nodes
    assert written.gpu.tolerated == bare.gpu.tolerated
    assert written.gpu.prior == name
    assert written.engine.memory_fraction == GPU_DEFAULTS[name].memory_fraction


def test_the_operator_gets_the_rights_that_its_code_asks_for_and_no_other(helm: str) -> None:
    roles = {role["metadata"]["name"]: role["rules"] for role in _of_kind(_rendered(helm), "ClusterRole")}

    assert roles == {
        "pools-release-kvrouting-operator-pools": pool_rules(),
        "pools-release-kvrouting-operator-crd": cluster_rules(),
    }


def test_an_operator_of_two_namespaces_is_bound_in_these_alone(helm: str) -> None:
    objects = _rendered(helm, "--values", str(CHART / "ci/namespaced-values.yaml"))

    assert _of_kind(objects, "ClusterRoleBinding") == []
    assert {body["metadata"]["namespace"] for body in _of_kind(objects, "RoleBinding")} == {"default", "kube-public"}
    (operator,) = _of_kind(objects, "Deployment")
    arguments = operator["spec"]["template"]["spec"]["containers"][0]["args"]
    assert {"--namespace=default", "--namespace=kube-public", "--no-apply-crd"} <= set(arguments)


def test_images_come_from_the_registry_and_pools_may_pull_from_it(helm: str) -> None:
    objects = _rendered(helm, "--values", str(CHART / "ci/secured-values.yaml"))

    (operator,) = _of_kind(objects, "Deployment")
    pod = operator["spec"]["template"]["spec"]
    assert pod["containers"][0]["image"] == "registry.example.com/mirror/kvrouting/operator:0.1.0"
    assert pod["imagePullSecrets"] == [{"name": "registry"}]
    assert operator["spec"]["strategy"] == {"type": "Recreate"}
    (pool,) = _of_kind(objects, "KVRoutingPool")
    assert pool["spec"]["podTemplate"]["spec"]["imagePullSecrets"] == [{"name": "registry"}]
    assert pool["spec"]["router"]["podTemplate"]["spec"]["imagePullSecrets"] == [{"name": "registry"}]


def test_replicas_are_left_to_an_autoscaler_unless_the_values_have_them(helm: str) -> None:
    (pool,) = _of_kind(_rendered(helm, "--values", str(CHART / "ci/autoscaled-values.yaml")), "KVRoutingPool")

    assert "replicas" not in pool["spec"]


_POOL: Mapping[str, str] = {"pools.p.preset": "L40", "pools.p.spec.model.name": "m"}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"operater.logLevel": "info"}, "operater"),
        ({"operator.logLevel": "loud"}, "logLevel"),
        ({"operator.resyncSeconds": "0"}, "resyncSeconds"),
        ({**_POOL, "pools.p.preset": "L400"}, 'pools.p.preset is "L400"; there are H200, L40, simulated'),
        ({**_POOL, "pools.p.spec.replica": "2"}, "replica"),
        ({**_POOL, "pools.p.spec.gpu.class": "L400"}, "class"),
        ({"pools.p.preset": "L40"}, "pools.p.spec.model.name is missing"),
        ({"pools.p.spec.model.name": "m"}, "pools.p needs a preset or spec.gpu"),
    ],
)
def test_values_that_mean_nothing_are_refused_with_the_reason(
    helm: str, change: Mapping[str, str], reason: str
) -> None:
    options = [f"--set={key}={value}" for key, value in change.items()]

    done = _helm(helm, "template", "release", str(CHART), *options)

    assert done.returncode != 0
    assert reason in done.stderr
