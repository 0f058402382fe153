"""From what is wished and what is seen to the objects that shall be. Pure: the same input gives the same bytes."""

from __future__ import annotations

from dataclasses import dataclass

from kvrouting_operator.observed import Observed, has_condition, is_leaving
from kvrouting_operator.pool import Images, Object, PoolKeys
from kvrouting_operator.rendered_template import chosen_template, digest
from kvrouting_operator.resources.access import (
    disruption_budget,
    router_network_policy,
    service_account,
    worker_network_policy,
)
from kvrouting_operator.resources.names import (
    APPLIED_ANNOTATION,
    DELETION_COST_ANNOTATION,
    ROUTER,
    WORKER,
    router_name,
    worker_name,
)
from kvrouting_operator.resources.router_deployment import router_deployment, router_template
from kvrouting_operator.resources.services import router_service, sync_service
from kvrouting_operator.resources.worker_deployment import worker_deployment, worker_template
from kvrouting_operator.resources.worker_inputs import RouterInputs, WorkerInputs
from kvrouting_operator.spec import PoolSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class DeletionCost:
    """How late a worker pod goes when workers are taken away: the lowest goes first."""

    pod: str
    cost: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """objects: in the order in which they are applied. costs: written before the objects, so that a Deployment that
    shrinks knows which pods to take.
    """

    objects: tuple[Object, ...]
    costs: tuple[DeletionCost, ...] = ()


def plan(spec: PoolSpec, observed: Observed, *, keys: PoolKeys, images: Images) -> Plan:
    """Raises: InvalidSpecError if podTemplate would break the pool."""
    pool = observed.identity
    any_ready = any(has_condition(p, "Ready") and not is_leaving(p) for p in observed.router_pods)
    objects = [
        service_account(pool, WORKER),
        service_account(pool, ROUTER),
        worker_network_policy(pool, spec.monitoring.namespaces),
        router_network_policy(pool),
        disruption_budget(pool, WORKER, max_unavailable=spec.rollout.max_unavailable),
        disruption_budget(pool, ROUTER, max_unavailable=1),
        sync_service(pool),
        router_service(pool, spec.router.service, any_router_ready=any_ready),
        _routers(spec, observed, keys=keys, images=images),
        _workers(spec, observed, keys=keys, images=images),
    ]
    return Plan(objects=tuple(_signed(o) for o in objects), costs=deletion_costs(spec, observed))


def _workers(spec: PoolSpec, observed: Observed, *, keys: PoolKeys, images: Images) -> Object:
    pool = observed.identity
    inputs = WorkerInputs.of(pool, spec, keys=keys.fingerprint)
    template, annotations = chosen_template(
        observed.live("Deployment", worker_name(pool.name)),
        inputs,
        lambda: worker_template(inputs, keys, images, native_sidecar=observed.native_sidecar),
    )
    return worker_deployment(pool, spec, template, annotations)


def _routers(spec: PoolSpec, observed: Observed, *, keys: PoolKeys, images: Images) -> Object:
    pool = observed.identity
    inputs = RouterInputs.of(pool, spec, keys=keys.fingerprint)
    template, annotations = chosen_template(
        observed.live("Deployment", router_name(pool.name)), inputs, lambda: router_template(inputs, images)
    )
    return router_deployment(pool, spec, template, annotations)


def _signed(body: Object) -> Object:
    """With a digest of itself, by which a later round sees that a field was dropped."""
    metadata = body["metadata"]
    annotations = {**metadata.get("annotations", {}), APPLIED_ANNOTATION: digest(body)}
    return {**body, "metadata": {**metadata, "annotations": annotations}}


def deletion_costs(spec: PoolSpec, observed: Observed) -> tuple[DeletionCost, ...]:
    """The changes of cost, while workers go: by requests in flight, then by tokens that no other worker has cached.

    A worker that no router knows serves nobody and goes first.
    """
    live = observed.live("Deployment", worker_name(observed.identity.name))
    if live is None or not _workers_go(spec, live):
        return ()
    pods = [pod for pod in observed.worker_pods if not is_leaving(pod)]

    def warmth(pod: Object) -> tuple[int, int, str]:
        known = observed.report.workers.get(pod["metadata"]["uid"])
        name = pod["metadata"]["name"]
        return (known.in_flight, known.unique_cached_tokens, name) if known else (-1, -1, name)

    ranked = [DeletionCost(pod=pod["metadata"]["name"], cost=rank) for rank, pod in enumerate(sorted(pods, key=warmth))]
    held = {p["metadata"]["name"]: p["metadata"].get("annotations", {}).get(DELETION_COST_ANNOTATION) for p in pods}
    return tuple(cost for cost in ranked if held[cost.pod] != str(cost.cost))


def _workers_go(spec: PoolSpec, live: Object) -> bool:
    """Whether the Deployment shrinks, or replaces its pods."""
    status = live.get("status", {})
    replaced = int(status.get("updatedReplicas", 0)) < int(status.get("replicas", 0))
    return replaced or spec.replicas < int(live["spec"].get("replicas", 0))
