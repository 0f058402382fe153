"""Who may reach and evict the pods of a pool: ServiceAccounts, NetworkPolicies, PodDisruptionBudgets."""

from __future__ import annotations

from collections.abc import Sequence

from kvrouting_operator.pool import Object, PoolIdentity
from kvrouting_operator.resources.names import (
    ENGINE_PORT,
    GRPC_PORT,
    ROUTER,
    ROUTER_PORT,
    SIDECAR_PORT,
    WORKER,
    component_labels,
    router_name,
    selector_labels,
    worker_name,
)
from kvrouting_operator.resources.owned import owned

_NAMES = {WORKER: worker_name, ROUTER: router_name}


def service_account(pool: PoolIdentity, component: str) -> Object:
    """An identity without any right and without a token: no pod of a pool talks to the API server."""
    return owned(
        pool,
        api_version="v1",
        kind="ServiceAccount",
        name=_NAMES[component](pool.name),
        labels=component_labels(pool.name, component),
        automountServiceAccountToken=False,
    )


def disruption_budget(pool: PoolIdentity, component: str, *, max_unavailable: int | str) -> Object:
    """How many pods a drain of nodes may take at a time."""
    return owned(
        pool,
        api_version="policy/v1",
        kind="PodDisruptionBudget",
        name=_NAMES[component](pool.name),
        labels=component_labels(pool.name, component),
        spec={
            "maxUnavailable": max_unavailable,
            "selector": {"matchLabels": selector_labels(pool.name, component)},
        },
    )


def _tcp(*ports: int) -> list[Object]:
    return [{"port": port, "protocol": "TCP"} for port in ports]


def _network_policy(pool: PoolIdentity, component: str, ingress: list[Object]) -> Object:
    return owned(
        pool,
        api_version="networking.k8s.io/v1",
        kind="NetworkPolicy",
        name=_NAMES[component](pool.name),
        labels=component_labels(pool.name, component),
        spec={
            "podSelector": {"matchLabels": selector_labels(pool.name, component)},
            "policyTypes": ["Ingress"],
            "ingress": ingress,
        },
    )


def _pods(pool: PoolIdentity, component: str) -> list[Object]:
    """Pods of the pool in its own namespace."""
    return [{"podSelector": {"matchLabels": selector_labels(pool.name, component)}}]


def worker_network_policy(pool: PoolIdentity, monitoring: Sequence[str] = ()) -> Object:
    """Only the pool's routers reach engine and sidecar (and the node's kubelet, which no policy stops).

    monitoring: namespaces whose pods may reach the sidecar as well, for its metrics.
    """
    ingress = [{"from": _pods(pool, ROUTER), "ports": _tcp(ENGINE_PORT, SIDECAR_PORT)}]
    if monitoring:
        ingress.append({"from": [_namespace(name) for name in monitoring], "ports": _tcp(SIDECAR_PORT)})
    return _network_policy(pool, WORKER, ingress)


def _namespace(name: str) -> Object:
    """All pods of a namespace, by the label that every API server sets."""
    return {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}}}


def router_network_policy(pool: PoolIdentity) -> Object:
    """Everybody reaches the HTTP port, only the pool's sidecars the gRPC port."""
    return _network_policy(
        pool, ROUTER, [{"ports": _tcp(ROUTER_PORT)}, {"from": _pods(pool, WORKER), "ports": _tcp(GRPC_PORT)}]
    )
