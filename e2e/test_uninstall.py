"""helm uninstall, as the last of all."""

from __future__ import annotations

from e2e.cluster import eventually
from e2e.conftest import Release


def test_uninstalling_leaves_the_crd_and_nothing_else(release: Release) -> None:
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
