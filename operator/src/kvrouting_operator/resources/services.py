"""The Services of a pool."""

from __future__ import annotations

from kvrouting_operator.pool import Object, PoolIdentity
from kvrouting_operator.resources.names import (
    GRPC_PORT,
    ROUTER,
    ROUTER_PORT,
    component_labels,
    router_name,
    selector_labels,
    sync_name,
)
from kvrouting_operator.resources.owned import owned
from kvrouting_operator.spec.router import RouterService


def router_service(pool: PoolIdentity, service: RouterService, *, any_router_ready: bool) -> Object:
    """The Service that clients talk to.

    While no router is ready it leads to those that are not: clients then get the router's own 503 with a reason and
    Retry-After instead of a refused connection.
    """
    port: Object = {"name": "http", "port": service.port, "protocol": "TCP", "targetPort": ROUTER_PORT}
    if service.node_port is not None:
        port["nodePort"] = service.node_port
    return owned(
        pool,
        api_version="v1",
        kind="Service",
        name=router_name(pool.name),
        labels=component_labels(pool.name, ROUTER),
        annotations=service.annotations,
        spec={
            "type": service.type,
            "selector": selector_labels(pool.name, ROUTER),
            "publishNotReadyAddresses": not any_router_ready,
            "ports": [port],
        },
    )


def sync_service(pool: PoolIdentity) -> Object:
    """Headless, so that a sidecar streams to every router; also to one that waits for its first worker to be ready."""
    return owned(
        pool,
        api_version="v1",
        kind="Service",
        name=sync_name(pool.name),
        labels=component_labels(pool.name, ROUTER),
        spec={
            "clusterIP": "None",
            "selector": selector_labels(pool.name, ROUTER),
            "publishNotReadyAddresses": True,
            "ports": [{"name": "grpc", "port": GRPC_PORT, "protocol": "TCP", "targetPort": GRPC_PORT}],
        },
    )


def endpoint(pool: PoolIdentity, service: RouterService) -> str:
    """Address of the router inside the cluster."""
    return f"http://{router_name(pool.name)}.{pool.namespace}.svc:{service.port}"


def sync_address(pool: PoolIdentity) -> str:
    """Name and port that a sidecar looks up."""
    return f"{sync_name(pool.name)}.{pool.namespace}.svc:{GRPC_PORT}"
