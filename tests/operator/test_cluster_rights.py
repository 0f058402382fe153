"""The operator's rights: it uses every verb that it is granted, and is refused nothing."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvrouting_operator.crd import KIND
from kvrouting_operator.rbac import Rules, cluster_rules, pool_rules
from tests.operator.kubernetes_under_test import Kubernetes, conditions, eventually, manifest, pool_path
from tests.operator.pools import raw_spec

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("gpu_nodes")]

ACCOUNT = "operator"
RIGHTS = "/apis/rbac.authorization.k8s.io/v1"


def grant(kube: Kubernetes, name: str, rules: Rules, home: str, namespace: str | None) -> None:
    """A ClusterRole, bound in one namespace, or in the cluster if there is none."""
    status, answer = kube.request("POST", f"{RIGHTS}/clusterroles", {"metadata": {"name": name}, "rules": rules})
    assert status == 201, answer
    binding = {
        "metadata": {"name": name},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": name},
        "subjects": [{"kind": "ServiceAccount", "name": ACCOUNT, "namespace": home}],
    }
    path = f"{RIGHTS}/namespaces/{namespace}/rolebindings" if namespace else f"{RIGHTS}/clusterrolebindings"
    status, answer = kube.request("POST", path, binding)
    assert status == 201, answer


def account_kubeconfig(kube: Kubernetes, home: str, folder: Path) -> Path:
    """A kubeconfig of the operator's ServiceAccount."""
    kube.request("POST", f"/api/v1/namespaces/{home}/serviceaccounts", {"metadata": {"name": ACCOUNT}})
    path = f"/api/v1/namespaces/{home}/serviceaccounts/{ACCOUNT}/token"
    _, answer = kube.request("POST", path, {"spec": {"expirationSeconds": 3600}})
    loaded = yaml.safe_load(kube.kubeconfig.read_text())
    loaded["users"][0]["user"] = {"token": answer["status"]["token"]}
    written = folder / "operator.kubeconfig"
    written.write_text(yaml.safe_dump(loaded))
    return written


@contextmanager
def operator_process(kubeconfig: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """The command as a pod would run it; it must end by itself and cleanly on SIGTERM."""
    command = [sys.executable, "-m", "kvrouting_operator", f"--kubeconfig={kubeconfig}", "--resync-s=1",
    "--router-limit-s=0.2", "--probe-host=127.0.0.1", "--probe-port=0", *options]  # fmt: skip
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        yield process
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=30)
        assert process.returncode == 0, errors[-3000:]
        assert '"exception"' not in errors, errors[-3000:]
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()


def used(kube: Kubernetes, home: str) -> tuple[set[tuple[str, str, str]], list[Any]]:
    """(API group, resource, verb) of what the account did, and the requests that were refused."""
    assert kube.kit is not None
    events = [e for e in kube.kit.audit(f"system:serviceaccount:{home}:{ACCOUNT}") if "objectRef" in e]
    verbs = set()
    for event in events:
        ref = event["objectRef"]
        resource = "/".join(part for part in (ref.get("resource"), ref.get("subresource")) if part)
        verbs.add((ref.get("apiGroup", ""), resource, event["verb"]))
    refused = [e for e in events if e.get("annotations", {}).get("authorization.k8s.io/decision") == "forbid"]
    return verbs, refused


def granted(rules: Rules) -> set[tuple[str, str, str]]:
    """The same of rules."""
    return {(g, r, v) for rule in rules for g in rule["apiGroups"] for r in rule["resources"] for v in rule["verbs"]}


# An apply of something new asks for the right to create, and is logged as a patch.
IMPLIED_BY_APPLY = {
    ("apps", "deployments", "create"),
    ("", "services", "create"),
    ("", "serviceaccounts", "create"),
    ("networking.k8s.io", "networkpolicies", "create"),
    ("policy", "poddisruptionbudgets", "create"),
}


def live_through(kube: Kubernetes, namespace: str) -> None:
    """A pool is made, grows and shrinks."""

    def available(replicas: int) -> bool:
        pool = kube.cluster.get(KIND, namespace, "llama") or {}
        ready = pool.get("status", {}).get("readyReplicas")
        return bool(ready == replicas and conditions(pool)["WorkersAvailable"][0] == "True")

    kube.request("POST", pool_path(namespace), manifest("llama", raw_spec(replicas=2)))
    eventually(lambda: available(2), what="two workers")
    kube.request("PATCH", pool_path(namespace, "llama"), {"spec": {"replicas": 1}})
    eventually(lambda: available(1), what="one worker")


def test_rights_are_those_that_are_used(kube: Kubernetes, namespace: str, tmp_path: Path) -> None:
    kubeconfig = account_kubeconfig(kube, namespace, tmp_path)
    grant(kube, f"{namespace}-pools", pool_rules(), namespace, None)
    grant(kube, f"{namespace}-cluster", cluster_rules(), namespace, None)
    with operator_process(kubeconfig):
        live_through(kube, namespace)
    verbs, refused = used(kube, namespace)
    assert refused == []
    assert verbs | IMPLIED_BY_APPLY == granted(pool_rules() + cluster_rules())


def test_rights_in_one_namespace_are_enough_for_it(kube: Kubernetes, namespace: str, tmp_path: Path) -> None:
    kubeconfig = account_kubeconfig(kube, namespace, tmp_path)
    grant(kube, f"{namespace}-pools", pool_rules(), namespace, namespace)
    with operator_process(kubeconfig, f"--namespace={namespace}", "--no-apply-crd"):
        live_through(kube, namespace)
    _, refused = used(kube, namespace)
    assert refused == []


def test_an_apply_needs_the_right_to_create(kube: Kubernetes, namespace: str, tmp_path: Path) -> None:
    """Why `create` is granted though no request of that verb is seen."""
    kubeconfig = account_kubeconfig(kube, namespace, tmp_path)
    without = [{**rule, "verbs": [v for v in rule["verbs"] if v != "create"]} for rule in pool_rules()]
    rules = [rule for rule in without if rule["verbs"]]
    rules.append({"apiGroups": [""], "resources": ["secrets", "events"], "verbs": ["create"]})
    grant(kube, f"{namespace}-pools", rules, namespace, namespace)
    kube.request("POST", pool_path(namespace), manifest("llama", raw_spec()))
    with operator_process(kubeconfig, f"--namespace={namespace}", "--no-apply-crd"):
        pool = eventually(
            lambda: (
                kube.cluster.get(KIND, namespace, "llama")
                if conditions(kube.cluster.get(KIND, namespace, "llama") or {}).get("Progressing")
                == ("False", "Rejected")
                else None
            ),
            what="the refusal in a condition",
        )
    assert "cannot create resource" in str(pool["status"])


def test_an_api_server_that_is_away_ends_nothing(kube: Kubernetes, tmp_path: Path) -> None:
    """The operator waits, alive and not ready."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        loaded = yaml.safe_load(kube.kubeconfig.read_text())
        loaded["clusters"][0]["cluster"]["server"] = f"https://127.0.0.1:{closed.getsockname()[1]}"
        written = tmp_path / "away.kubeconfig"
        written.write_text(yaml.safe_dump(loaded))
        options = [f"--kubeconfig={written}", "--probe-port=0", "--api-limit-s=1"]
        command = [sys.executable, "-m", "kvrouting_operator", *options]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            try:
                assert process.stderr is not None
                lines = (process.stderr.readline() for _ in range(100))
                assert any("waits for the CRD" in line for line in lines)
                time.sleep(0.5)
                assert process.poll() is None
            finally:
                process.kill()
