"""The CustomResourceDefinition, made from the typed definition."""

from __future__ import annotations

from typing import Any

from kvrouting_operator.spec import PoolSpec
from kvrouting_operator.status import PoolStatus
from kvrouting_operator.structural_schema import Schema, schema_of

GROUP = "kvrouting.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "KVRoutingPool"
PLURAL = "kvroutingpools"
CRD_NAME = f"{PLURAL}.{GROUP}"

# Names of owned objects are the pool's name and a suffix; a Service's name is a DNS label of at most 63 characters, and
# a pod's name adds 17 to its Deployment's.
POOL_NAME_RULE = {
    "rule": "self.metadata.name.matches('^[a-z]([-a-z0-9]{0,38}[a-z0-9])?$')",
    "message": "a pool's name begins with a letter and has at most 40 characters of a-z, 0-9 and -",
}


def _column(name: str, kind: str, path: str, description: str, *, priority: int = 0) -> dict[str, object]:
    column: dict[str, object] = {"name": name, "type": kind, "jsonPath": path, "description": description}
    # The API server drops a 0: applying one again would look like another value than the stored one, a conflict
    # between Helm and the operator.
    return {**column, "priority": priority} if priority else column


_COLUMNS = [
    _column("Model", "string", ".spec.model.name", "Model that the pool serves."),
    _column("GPU", "string", ".spec.gpu.class", "Card of the workers."),
    _column("Wanted", "integer", ".spec.replicas", "Workers wanted."),
    _column("Ready", "integer", ".status.readyReplicas", "Workers ready."),
    _column("Status", "string", '.status.conditions[?(@.type=="Ready")].reason', "Why the pool is ready or not."),
    _column("Endpoint", "string", ".status.endpoint", "Address of the router.", priority=1),
    _column("Message", "string", '.status.conditions[?(@.type=="Ready")].message', "Why, in a sentence.", priority=1),
    _column("Age", "date", ".metadata.creationTimestamp", "Since the pool was made."),
]


def status_schema() -> Schema:
    """The status, with lists that are merged by key."""
    schema = schema_of(PoolStatus)
    for field in schema["properties"].values():
        field.pop("default", None)
    for field, key in (("workers", "pod"), ("conditions", "type")):
        schema["properties"][field] |= {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key]}
    return schema


def pool_schema() -> Schema:
    """The whole object."""
    return {
        "description": "A pool of engines that share one model, behind routers that know each engine's prefix cache.",
        "type": "object",
        "required": ["spec"],
        "x-kubernetes-validations": [POOL_NAME_RULE],
        "properties": {
            "apiVersion": {"type": "string", "description": f"{API_VERSION}."},
            "kind": {"type": "string", "description": f"{KIND}."},
            "metadata": {"type": "object"},
            "spec": schema_of(PoolSpec),
            "status": status_schema(),
        },
    }


def custom_resource_definition() -> dict[str, Any]:
    """The object that is applied to a cluster."""
    version = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": pool_schema()},
        "subresources": {
            "status": {},
            "scale": {
                "specReplicasPath": ".spec.replicas",
                "statusReplicasPath": ".status.replicas",
                "labelSelectorPath": ".status.selector",
            },
        },
        "additionalPrinterColumns": _COLUMNS,
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": CRD_NAME},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": PLURAL,
                "singular": KIND.lower(),
                "shortNames": ["kvp"],
                "categories": ["all"],
            },
            "versions": [version],
        },
    }
