"""helm upgrade and rollback beside an autoscaler."""

from __future__ import annotations

from e2e.cluster import Object
from e2e.conftest import CHART, Release


def _autoscaler(namespace: str) -> Object:
    """It has no metric here, and raises replicas to its minimum all the same."""
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": "first", "namespace": namespace},
        "spec": {
            "scaleTargetRef": {"apiVersion": "kvrouting.dev/v1alpha1", "kind": "KVRoutingPool", "name": "first"},
            "minReplicas": 2,
            "maxReplicas": 3,
        },
    }


def test_upgrade_and_rollback_leave_an_autoscalers_replicas_and_every_pod_alone(release: Release) -> None:
    pool, cluster, where = release.pool, release.cluster, ("--namespace", release.namespace, "--wait", "--timeout=180s")
    pool.wait_until_good(workers=1)
    cluster.apply(_autoscaler(release.namespace))
    pool.wait_until_good(workers=2)
    workers, routers = pool.pod_names("worker"), pool.pod_names("router")
    operator = ("deployment", f"{release.name}-kvrouting-operator", "--namespace", release.namespace)

    change = ("--values", str(release.values), "--set=operator.logLevel=debug", "--set=pools.first.labels.team=search")
    cluster.helm("upgrade", release.name, CHART, *change, *where)
    assert pool.body()["metadata"]["labels"]["team"] == "search"
    assert "--log-level=debug" in cluster.get(*operator)["spec"]["template"]["spec"]["containers"][0]["args"]
    assert pool.wait_until_good(workers=2)["spec"]["replicas"] == 2

    cluster.helm("rollback", release.name, "1", *where)
    assert "team" not in pool.body()["metadata"]["labels"]
    assert "--log-level=info" in cluster.get(*operator)["spec"]["template"]["spec"]["containers"][0]["args"]
    assert pool.wait_until_good(workers=2)["spec"]["replicas"] == 2

    assert pool.pod_names("worker") == workers
    assert pool.pod_names("router") == routers
