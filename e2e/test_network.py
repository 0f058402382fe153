"""Who may reach whom."""

from __future__ import annotations

from e2e.cluster import Cluster, Object, eventually
from e2e.pool import Pool

_TRY = (
    "import socket, sys\n"
    "for target in sys.argv[1:]:\n"
    "    host, port = target.rsplit(':', 1)\n"
    "    try:\n"
    "        socket.create_connection((host, int(port)), timeout=3).close()\n"
    "        print(port, 'open')\n"
    "    except OSError:\n"
    "        print(port, 'closed')\n"
)


def _foreign_pod(cluster: Cluster, namespace: str) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "foreign", "namespace": namespace},
        "spec": {
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": 0,
            "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [
                {
                    "name": "client",
                    "image": cluster.images.of("router"),
                    "command": ["sleep", "3600"],
                    "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
                }
            ],
        },
    }


def _tried(pool: Pool, pod: str, container: str, targets: list[str]) -> dict[str, str]:
    said = pool.kubectl("exec", pod, "--container", container, "--", "python3", "-c", _TRY, *targets)
    return dict(line.split(" ", 1) for line in said.split("\n") if line)


def test_a_foreign_pod_reaches_nothing_behind_the_router_but_metrics_where_the_pool_allows_it(
    pair: Pool,
) -> None:
    pool = pair
    pool.cluster.apply(_foreign_pod(pool.cluster, pool.namespace))
    pool.kubectl("wait", "pod/foreign", "--for=condition=Ready", "--timeout=120s")
    (router,), worker = pool.pods("router"), pool.pods("worker")[0]
    to_worker = [f"{worker['status']['podIP']}:{port}" for port in (30000, 9400)]
    to_router = [f"{router['status']['podIP']}:{port}" for port in (8080, 9090)]

    closed = {"30000": "closed", "9400": "closed", "8080": "open", "9090": "closed"}
    eventually(
        "the foreign pod reaches the router's HTTP alone",
        lambda: _tried(pool, "foreign", "client", [*to_worker, *to_router]) == closed,
        patience_s=30,
    )
    # Prometheus is let in to the page of metrics, and to nothing that takes prompts.
    pool.patch({"monitoring": {"namespaces": [pool.namespace]}})
    eventually(
        "the sidecar's page opens to the namespace that the pool names",
        lambda: _tried(pool, "foreign", "client", to_worker) == {"30000": "closed", "9400": "open"},
        patience_s=60,
    )
    pool.patch({"monitoring": None})
    # The same ports are open to those that need them.
    assert _tried(pool, router["metadata"]["name"], "router", to_worker) == {"30000": "open", "9400": "open"}
    assert _tried(pool, worker["metadata"]["name"], "sidecar", to_router) == {"8080": "open", "9090": "open"}
