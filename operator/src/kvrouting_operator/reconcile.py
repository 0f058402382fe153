"""One round for one pool: observe, plan, apply, and say in the status what is seen."""

from __future__ import annotations

import datetime as dt
import logging
from collections.abc import Callable
from dataclasses import dataclass

from kvrouting_operator.apply import apply_plan
from kvrouting_operator.cluster import Cluster, NotFoundError, RejectedError
from kvrouting_operator.crd import API_VERSION, KIND
from kvrouting_operator.observe import Observer
from kvrouting_operator.observed import Observed, Problem
from kvrouting_operator.plan import plan
from kvrouting_operator.pool import Images, InvalidSpecError, Object, PoolIdentity, PoolKey, parse_spec
from kvrouting_operator.pool_status import Transition, is_settled, pool_status, transitions
from kvrouting_operator.rendered_template import is_outdated
from kvrouting_operator.resources.names import FIELD_MANAGER, router_name, worker_name
from kvrouting_operator.resources.router_deployment import router_template
from kvrouting_operator.resources.worker_deployment import worker_template
from kvrouting_operator.resources.worker_inputs import RouterInputs, WorkerInputs
from kvrouting_operator.spec import PoolSpec
from kvrouting_operator.status import PoolStatus, plain_status

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """settled: nothing is under way. stuck: something keeps the pool from what its spec asks for."""

    settled: bool
    stuck: bool = False


class Reconciler:
    """Synchronous, and safe to call from several threads for different pools. now: aware, in UTC."""

    def __init__(self, *, cluster: Cluster, observer: Observer, images: Images, now: Callable[[], dt.datetime]) -> None:
        self._cluster = cluster
        self._observer = observer
        self._images = images
        self._now = now

    def reconcile(self, key: PoolKey) -> Outcome | None:
        """None: the pool is gone or goes, and the garbage collector does the rest. Raises: ClusterError."""
        raw = self._cluster.get(KIND, key.namespace, key.name)
        if raw is None or "deletionTimestamp" in raw["metadata"]:
            return None
        spec, problems = _spec_of(raw)
        observed = self._observer.observe(raw, spec)
        problems += observed.problems
        if spec is not None:
            problems += self._bring_about(spec, observed)
        status = pool_status(
            spec, observed, problems=problems, outdated=self._outdated(spec, observed), now=_rfc3339(self._now())
        )
        self._publish(observed, status)
        return Outcome(settled=is_settled(status), stuck=bool(problems))

    def _bring_about(self, spec: PoolSpec, observed: Observed) -> tuple[Problem, ...]:
        if observed.keys is None:
            return ()
        try:
            planned = plan(spec, observed, keys=observed.keys, images=self._images)
        except InvalidSpecError as error:
            return (Problem(reason="InvalidSpec", message=str(error)),)
        return apply_plan(planned, observed, self._cluster)

    def _outdated(self, spec: PoolSpec | None, observed: Observed) -> bool:
        """Whether the pods are what an earlier operator made of the same spec."""
        if spec is None or observed.keys is None:
            return False
        pool, keys = observed.identity, observed.keys
        workers = WorkerInputs.of(pool, spec, keys=keys.fingerprint)
        routers = RouterInputs.of(pool, spec, keys=keys.fingerprint)
        try:
            fresh = {
                worker_name: worker_template(workers, keys, self._images, native_sidecar=observed.native_sidecar),
                router_name: router_template(routers, self._images),
            }
        except InvalidSpecError:
            return False
        return any(is_outdated(observed.live("Deployment", name(pool.name)), body) for name, body in fresh.items())

    def _publish(self, observed: Observed, status: PoolStatus) -> None:
        """Writes the status if it differs, and events for what changed."""
        plain, previous = plain_status(status), observed.raw.get("status", {})
        if plain == previous:
            return
        pool = observed.identity
        metadata = {"name": pool.name, "namespace": pool.namespace, "uid": pool.uid}
        try:
            self._cluster.apply_status({"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "status": plain})
        except NotFoundError:
            return
        for transition in transitions(previous, status):
            self._announce(pool, transition)

    def _announce(self, pool: PoolIdentity, transition: Transition) -> None:
        _logger.info(
            "a condition changed",
            extra={"fields": {"pool": str(pool.key), "reason": transition.reason, "message": transition.message}},
        )
        try:
            self._cluster.create(event(pool, transition, now=self._now()))
        except (RejectedError, NotFoundError) as error:
            # An event is a courtesy: a namespace that is being deleted takes none.
            _logger.info("an event was refused", extra={"fields": {"pool": str(pool.key), "error": str(error)}})


def _spec_of(raw: Object) -> tuple[PoolSpec | None, tuple[Problem, ...]]:
    try:
        return parse_spec(raw.get("spec", {})), ()
    except InvalidSpecError as error:
        return None, (Problem(reason="InvalidSpec", message=str(error)),)


def event(pool: PoolIdentity, transition: Transition, *, now: dt.datetime) -> Object:
    """An event on the pool."""
    stamp = _rfc3339(now)
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"generateName": f"{pool.name}.", "namespace": pool.namespace},
        "involvedObject": {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "name": pool.name,
            "namespace": pool.namespace,
            "uid": pool.uid,
        },
        "type": transition.severity,
        "reason": transition.reason,
        "message": transition.message,
        "source": {"component": FIELD_MANAGER},
        "firstTimestamp": stamp,
        "lastTimestamp": stamp,
        "count": 1,
    }


def _rfc3339(moment: dt.datetime) -> str:
    return moment.astimezone(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
