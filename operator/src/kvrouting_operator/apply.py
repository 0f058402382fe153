"""Brings the cluster to a plan. I/O through the Cluster protocol only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvrouting_operator.cluster import Cluster, FieldConflictError, NotFoundError, RejectedError, created_of
from kvrouting_operator.observed import Observed, Problem
from kvrouting_operator.plan import DeletionCost, Plan
from kvrouting_operator.pool import Object
from kvrouting_operator.resources.names import APPLIED_ANNOTATION, DELETION_COST_ANNOTATION


def apply_plan(plan: Plan, observed: Observed, cluster: Cluster) -> tuple[Problem, ...]:
    """Applies what is not yet so; what fails for one object does not keep the others from being applied.

    Returns: why objects could not be applied. Raises: UnavailableError.
    """
    for cost in plan.costs:
        _write_cost(cost, observed, cluster)
    problems = [_apply(body, observed, cluster) for body in plan.objects]
    return tuple(problem for problem in problems if problem is not None)


def _write_cost(cost: DeletionCost, observed: Observed, cluster: Cluster) -> None:
    metadata = {
        "name": cost.pod,
        "namespace": observed.identity.namespace,
        "annotations": {DELETION_COST_ANNOTATION: str(cost.cost)},
        "uid": next(p["metadata"]["uid"] for p in observed.worker_pods if p["metadata"]["name"] == cost.pod),
    }
    try:
        cluster.apply({"apiVersion": "v1", "kind": "Pod", "metadata": metadata})
    except (FieldConflictError, NotFoundError, RejectedError):
        # Somebody else decides which of the pods goes first, or the pod is gone: then it has no say here.
        return


def _apply(body: Object, observed: Observed, cluster: Cluster) -> Problem | None:
    name = body["metadata"]["name"]
    live = observed.live(body["kind"], name)
    if live is not None and is_as_applied(live, body):
        return None
    if live is None and _is_taken(body, observed, cluster):
        return Problem(reason="NameTaken", message=f"{created_of(body)} exists and is not this pool's")
    try:
        cluster.apply(body)
    except FieldConflictError as error:
        return Problem(reason="FieldConflict", message=f"{created_of(body)}: {error}")
    except RejectedError as error:
        return Problem(reason="Rejected", message=f"{created_of(body)}: {error}")
    return None


def _is_taken(body: Object, observed: Observed, cluster: Cluster) -> bool:
    """Server-side apply would take over an object of the same name: whose it is must be known before."""
    found = cluster.get(body["kind"], observed.identity.namespace, body["metadata"]["name"])
    return found is not None and not observed.identity.owns(found)


def is_as_applied(live: Mapping[str, Any], body: Mapping[str, Any]) -> bool:
    """Whether applying would change nothing: the same was applied before, and every field of it still holds."""
    applied = live["metadata"].get("annotations", {}).get(APPLIED_ANNOTATION)
    return bool(applied == body["metadata"]["annotations"][APPLIED_ANNOTATION]) and holds(live, body)


def holds(live: object, wanted: object) -> bool:
    """Whether everything that is wanted is there; the API server may have added more to maps, and not to lists."""
    if isinstance(wanted, Mapping):
        return isinstance(live, Mapping) and all(
            (key in live and holds(live[key], value)) or _is_empty(value, live.get(key))
            for key, value in wanted.items()
        )
    if isinstance(wanted, list):
        return isinstance(live, list) and len(live) == len(wanted) and all(map(holds, live, wanted))
    return live == wanted


def _is_empty(wanted: object, live: object) -> bool:
    """The API server leaves empty lists, maps and False away."""
    return live is None and wanted in ([], {}, False)
