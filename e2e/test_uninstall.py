"""helm uninstall, as the last of all."""

from __future__ import annotations

import shutil
from pathlib import Path

from e2e.cluster import eventually
from e2e.conftest import CHART, Release


def test_uninstalling_leaves_the_crd_and_nothing_else(release: Release, tmp_path: Path) -> None:
    cluster, namespace = release.cluster, release.namespace
    release.pool.wait_until_good(workers=release.pool.body()["spec"]["replicas"])

    cluster.helm("uninstall", release.name, "--namespace", namespace, "--wait")

    kinds = "kvp,deployments,services,secrets,serviceaccounts,networkpolicies,poddisruptionbudgets,pods"
    expected = {"serviceaccount/default"}

    def left() -> set[str]:
        return set(cluster.kubectl("get", kinds, "--namespace", namespace, "--output=name").split())

    eventually("everything is gone", lambda: left() == expected, patience_s=150)
    mine = ["--selector", f"app.kubernetes.io/instance={release.name}", "--output=name"]
    assert cluster.kubectl("get", "clusterroles,clusterrolebindings", *mine).split() == []
    crd = "customresourcedefinition.apiextensions.k8s.io/kvroutingpools.kvrouting.dev"
    assert cluster.kubectl("get", "crd", "--output=name").split() == [crd]

    # The CRD that is left, of this version, does not keep a chart of another version from being installed.
    other = shutil.copytree(CHART, tmp_path / "kvrouting")
    crd_file = other / "crds/kvroutingpools.kvrouting.dev.yaml"
    crd_file.write_text(crd_file.read_text().replace("The model that all workers serve.", "Of another version.", 1))
    again = (release.name, str(other), "--namespace", namespace, "--set=operator.enabled=false", "--wait")
    cluster.helm("install", *again)
    assert "Of another version." in cluster.kubectl("get", crd, "--output=yaml")
    cluster.helm("uninstall", release.name, "--namespace", namespace)
