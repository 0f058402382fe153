"""Names, labels and ports of what a pool owns.

A name is the pool's name, a dash and a suffix without a dash: the last dash parts them in one way only, so two pools
of a namespace never share a name.
"""

from __future__ import annotations

from collections.abc import Mapping

FIELD_MANAGER = "kvrouting-operator"
# Of the CRD alone: it comes from Helm and is brought up to date by the operator. Under two names Helm 4 would refuse to
# install a chart of another version than the operator's ("conflict with ..."), long after the release is gone.
CRD_FIELD_MANAGER = "helm"

POOL_LABEL = "kvrouting.dev/pool"
COMPONENT_LABEL = "app.kubernetes.io/component"
WORKER = "worker"
ROUTER = "router"

ENGINE_CONTAINER = "engine"
SIDECAR_CONTAINER = "sidecar"
ROUTER_CONTAINER = "router"
PLUGIN_CONTAINER = "plugin"

ENGINE_PORT = 30000
SIDECAR_PORT = 9400
ROUTER_PORT = 8080
GRPC_PORT = 9090
# Bases; data-parallel rank r takes base + r, at most 16 ranks.
EVENTS_PORT = 5557
REPLAY_PORT = 5657
LOAD_PORT = 5757
STATE_PORT = 5857

DRAIN_HEADER = "x-kvrouting-drain-token"

# On an owned object: digest of what it was applied as.
APPLIED_ANNOTATION = "kvrouting.dev/applied"
# On a Deployment: digest of what its pod template was rendered from, and the template.
INPUTS_ANNOTATION = "kvrouting.dev/template-inputs"
TEMPLATE_ANNOTATION = "kvrouting.dev/template"
# On a pod: digest of the pool's keys.
KEYS_ANNOTATION = "kvrouting.dev/keys"
DELETION_COST_ANNOTATION = "controller.kubernetes.io/pod-deletion-cost"


def worker_name(pool: str) -> str:
    """Deployment, ServiceAccount, NetworkPolicy and PodDisruptionBudget of the workers."""
    return f"{pool}-worker"


def router_name(pool: str) -> str:
    """Deployment, Service, ServiceAccount, NetworkPolicy and PodDisruptionBudget of the routers."""
    return f"{pool}-router"


def sync_name(pool: str) -> str:
    """The headless Service by which sidecars find every router."""
    return f"{pool}-sync"


def keys_name(pool: str) -> str:
    """The Secret with the pool's keys."""
    return f"{pool}-keys"


def pool_labels(pool: str) -> dict[str, str]:
    """On everything that a pool owns."""
    return {
        "app.kubernetes.io/name": "kvrouting",
        "app.kubernetes.io/managed-by": FIELD_MANAGER,
        POOL_LABEL: pool,
    }


def component_labels(pool: str, component: str) -> dict[str, str]:
    """On everything of the workers or of the routers."""
    return {**pool_labels(pool), COMPONENT_LABEL: component}


def selector_labels(pool: str, component: str) -> dict[str, str]:
    """What selects the pods of one component of one pool. It must never change: Deployments keep it for life."""
    return {POOL_LABEL: pool, COMPONENT_LABEL: component}


def selector_text(labels: Mapping[str, str]) -> str:
    """As in a query."""
    return ",".join(f"{key}={value}" for key, value in sorted(labels.items()))
