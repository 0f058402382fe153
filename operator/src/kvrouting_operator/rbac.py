"""What the operator may do: every verb here is used, and no other is."""

from __future__ import annotations

from typing import Any

from kvrouting_operator.crd import CRD_NAME, GROUP, PLURAL

Rules = list[dict[str, Any]]


def _rule(group: str, resources: list[str], verbs: list[str], **more: list[str]) -> dict[str, Any]:
    return {"apiGroups": [group], "resources": resources, **more, "verbs": verbs}


def pool_rules() -> Rules:
    """In every namespace with pools: a ClusterRole, bound by RoleBindings if the operator serves some namespaces
    only.
    """
    made = ["get", "list", "create", "patch"]
    return [
        _rule(GROUP, [PLURAL], ["get", "list", "watch"]),
        _rule(GROUP, [f"{PLURAL}/status"], ["patch"]),
        _rule("apps", ["deployments"], ["get", "list", "watch", "create", "patch"]),
        _rule("", ["services", "serviceaccounts"], made),
        _rule("networking.k8s.io", ["networkpolicies"], made),
        _rule("policy", ["poddisruptionbudgets"], made),
        _rule("", ["pods"], ["list", "watch", "patch"]),
        _rule("", ["secrets"], ["get", "create"]),
        _rule("", ["events"], ["create"]),
    ]


def cluster_rules() -> Rules:
    """Once in the cluster: the operator brings the CRD up to its own version."""
    crds = "customresourcedefinitions"
    return [_rule("apiextensions.k8s.io", [crds], ["get", "patch"], resourceNames=[CRD_NAME])]


def chart_rules() -> dict[str, Rules]:
    """As the chart reads them."""
    return {"pools": pool_rules(), "cluster": cluster_rules()}
