"""The conditions of a pool, each from what is seen. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kvrouting_operator.observed import Observed, Problem, condition_of, has_condition, is_leaving
from kvrouting_operator.pool import Object
from kvrouting_operator.resources.names import ROUTER_CONTAINER, router_name, worker_name
from kvrouting_operator.spec import PoolSpec
from kvrouting_operator.status import ConditionType, Truth, WorkerStatus
from kvrouting_operator.worker_status import pod_trouble

_NAMED = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """A condition without its history."""

    type: ConditionType
    status: Truth
    reason: str
    message: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """What the conditions are judged by. spec: None if it is invalid. workers: the status of each worker pod."""

    observed: Observed
    spec: PoolSpec | None
    workers: tuple[WorkerStatus, ...]
    problems: tuple[Problem, ...]
    outdated: bool = False

    @property
    def wanted(self) -> int:
        """Workers wanted; of an invalid spec what the Deployment has."""
        if self.spec is not None:
            return self.spec.replicas
        live = self.observed.live("Deployment", worker_name(self.observed.identity.name))
        return int(live["spec"].get("replicas", 0)) if live else 0

    @property
    def ready(self) -> int:
        """Worker pods that are ready and stay."""
        return sum(has_condition(pod, "Ready") and not is_leaving(pod) for pod in self.observed.worker_pods)

    @property
    def reported(self) -> tuple[WorkerStatus, ...]:
        """Workers that stay and that a router knows."""
        return tuple(w for w in self.workers if w.mirror is not None and w.phase != "Draining")


def findings(view: View) -> tuple[Finding, ...]:
    """All eight conditions, Ready first."""
    workers, router = workers_available(view), router_available(view)
    flowing, synced, eviction = events_flowing(view), cache_synced(view), eviction_active(view)
    parts = (workers, router, flowing, synced, eviction)
    return (ready(view, parts), progressing(view), *parts, draining(view))


def ready(view: View, parts: Iterable[Finding]) -> Finding:
    """All that the spec asks for is there and serves."""
    if view.spec is None and view.problems and view.wanted == 0:
        return Finding(type="Ready", status="False", reason=view.problems[0].reason, message=view.problems[0].message)
    if view.wanted == 0:
        return Finding(type="Ready", status="False", reason="ScaledToZero", message="replicas is 0: requests get 503")
    missing = [part for part in parts if part.status != "True"]
    if not missing:
        return Finding(type="Ready", status="True", reason="Ready", message=f"{view.ready} workers serve")
    first = next((part for part in missing if part.status == "False"), missing[0])
    serving = f"; {view.ready} of {view.wanted} workers are ready" if view.ready else ""
    return Finding(type="Ready", status="False", reason=first.reason, message=f"{first.type}: {first.message}{serving}")


def progressing(view: View) -> Finding:
    """Whether the pool is on its way to what the spec asks for, and what keeps it from that."""
    if view.problems:
        reason, message = view.problems[0].reason, "; ".join(problem.message for problem in view.problems)
        return Finding(type="Progressing", status="False", reason=reason, message=message)
    for component, name in (("workers", worker_name), ("routers", router_name)):
        live = view.observed.live("Deployment", name(view.observed.identity.name))
        # Without a worker no router becomes ready, however long it runs.
        finding = _rollout(component, live, has_deadline=component == "workers" or view.ready > 0)
        if finding is not None:
            return finding
    message = ""
    if view.outdated:
        message = "pods keep what an earlier operator made of them; any change of rollout.trigger renders them anew"
    return Finding(type="Progressing", status="False", reason="UpToDate", message=message)


def _rollout(component: str, live: Mapping[str, Any] | None, *, has_deadline: bool) -> Finding | None:
    if live is None:
        return Finding(type="Progressing", status="True", reason="Creating", message=f"the {component} are being made")
    status, wanted = live.get("status", {}), live["spec"].get("replicas", 0)
    deadline = condition_of(live, "Progressing")
    if has_deadline and deadline.get("reason") == "ProgressDeadlineExceeded":
        text = f"the {component} have not come up in time: {deadline.get('message', '')}"
        return Finding(type="Progressing", status="False", reason="DeadlineExceeded", message=text)
    seen = status.get("observedGeneration", 0) >= live["metadata"].get("generation", 0)
    updated, total = status.get("updatedReplicas", 0), status.get("replicas", 0)
    if not seen or updated < wanted or total > updated:
        text = f"{component}: {updated} of {wanted} are up to date, {total} exist"
        return Finding(type="Progressing", status="True", reason="RollingOut", message=text)
    return None


def workers_available(view: View) -> Finding:
    """All workers that are wanted are ready."""
    name: ConditionType = "WorkersAvailable"
    if view.wanted == 0:
        return Finding(type=name, status="True", reason="ScaledToZero", message="none is wanted")
    text = f"{view.ready} of {view.wanted} workers are ready"
    if view.ready >= view.wanted:
        return Finding(type=name, status="True", reason="AllReady", message=text)
    failure = _not_created(view.observed.live("Deployment", worker_name(view.observed.identity.name)))
    if failure is not None:
        return Finding(type=name, status="False", reason=failure.reason, message=f"{text}; {failure.message}")
    waiting = [w for w in view.workers if w.phase in ("Pending", "Failed", "Starting")]
    waiting.sort(key=lambda w: ("Failed", "Pending", "Starting").index(w.phase))
    if not waiting:
        return Finding(type=name, status="False", reason="NotReady", message=text)
    described = _described(waiting, lambda w: f"{w.reason}: {w.message or ''}".rstrip(": "))
    return Finding(type=name, status="False", reason=waiting[0].reason or "NotReady", message=f"{text}; {described}")


def _not_created(live: Mapping[str, Any] | None) -> Problem | None:
    """Why pods are not even made: a quota, an admission."""
    failure = condition_of(live, "ReplicaFailure") if live is not None else {}
    if failure.get("status") != "True":
        return None
    message = failure.get("message", "")
    reason = "QuotaExceeded" if "exceeded quota" in message else failure.get("reason", "FailedCreate")
    return Problem(reason=reason, message=message)


def router_available(view: View) -> Finding:
    """All routers run. Ready they are only with a worker, so without one their processes count."""
    name: ConditionType = "RouterAvailable"
    pods = [pod for pod in view.observed.router_pods if not is_leaving(pod)]
    live = view.observed.live("Deployment", router_name(view.observed.identity.name))
    wanted = view.spec.router.replicas if view.spec else int(live["spec"].get("replicas", 1)) if live else 1
    ready_pods = [pod for pod in pods if has_condition(pod, "Ready")]
    if len(ready_pods) >= wanted:
        return Finding(type=name, status="True", reason="AllReady", message=f"{len(ready_pods)} of {wanted} are ready")
    started = [pod for pod in pods if _started(pod)]
    if view.ready == 0 and len(started) >= wanted:
        text = f"{len(started)} of {wanted} run and wait for a worker"
        return Finding(type=name, status="True", reason="WaitsForWorkers", message=text)
    text = f"{len(ready_pods)} of {wanted} routers are ready"
    failure = _not_created(live)
    if failure is not None:
        return Finding(type=name, status="False", reason=failure.reason, message=f"{text}; {failure.message}")
    for pod in pods:
        trouble = pod_trouble(pod)
        if trouble is not None:
            said = f"{text}; {pod['metadata']['name']}: {trouble.message}"
            return Finding(type=name, status="False", reason=trouble.reason, message=said)
    return Finding(type=name, status="False", reason="NotReady", message=text)


def _started(pod: Object) -> bool:
    statuses = pod.get("status", {}).get("containerStatuses", [])
    return any(s["name"] == ROUTER_CONTAINER and s.get("started", False) for s in statuses)


def _judged(view: View, name: ConditionType) -> Finding | None:
    """Why nothing can be said yet; None if routers and workers are known."""
    if view.wanted == 0 and not view.reported:
        return Finding(type=name, status="Unknown", reason="ScaledToZero", message="there is no worker")
    if view.observed.report.answered == 0:
        silent = "; ".join(view.observed.report.silent) or "no router runs"
        return Finding(type=name, status="Unknown", reason="NoRouterAnswers", message=silent)
    if not view.reported:
        return Finding(type=name, status="Unknown", reason="NoWorkerKnown", message="no router knows a worker yet")
    return None


def events_flowing(view: View) -> Finding:
    """The engines' cache events reach the sidecars."""
    name: ConditionType = "EventsFlowing"
    unknown = _judged(view, name)
    if unknown is not None:
        return unknown
    uids = {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in view.observed.worker_pods}
    flows = {w.pod: view.observed.report.workers[uids[w.pod]].events_flowing for w in view.reported}
    dry = [w for w in view.reported if flows[w.pod] is False]
    if dry:
        described = _described(dry, lambda _w: "its engine sends no cache events")
        return Finding(type=name, status="False", reason="NoEvents", message=described)
    if None in flows.values():
        return Finding(type=name, status="Unknown", reason="NoHeartbeatYet", message="waits for a first heartbeat")
    return Finding(type=name, status="True", reason="Flowing", message=f"from {len(flows)} workers")


def cache_synced(view: View) -> Finding:
    """The routers know the cache of every worker exactly."""
    name: ConditionType = "CacheSynced"
    unknown = _judged(view, name)
    if unknown is not None:
        return unknown
    behind = [w for w in view.workers if w.phase in ("Syncing", "Suspect")]
    if behind:
        described = _described(behind, lambda w: w.message or w.phase)
        return Finding(type=name, status="False", reason=behind[0].phase, message=described)
    inexact = [w for w in view.reported if w.mirror != "exact"]
    if inexact:
        described = _described(inexact, lambda w: f"its mirror is {w.mirror}")
        return Finding(type=name, status="False", reason="NotExact", message=described)
    return Finding(
        type=name, status="True", reason="Exact", message=f"the cache of {len(view.reported)} workers is known"
    )


def eviction_active(view: View) -> Finding:
    """Every engine proves that the policy of the spec is at work."""
    name: ConditionType = "EvictionPolicyActive"
    unknown = _judged(view, name)
    if unknown is not None:
        return unknown
    wanted = view.spec.engine.eviction.policy if view.spec else None
    other = [w for w in view.reported if wanted and w.eviction_policy not in (wanted, None)]
    if other:
        described = _described(other, lambda w: f"its engine evicts by {w.eviction_policy}, wanted is {wanted}")
        return Finding(type=name, status="False", reason="OtherPolicy", message=described)
    unproven = [w for w in view.reported if w.eviction_policy_live is False]
    if unproven:
        text = f"its engine does not prove {wanted or 'its policy'} at work: is the plug-in in the image?"
        return Finding(type=name, status="False", reason="NotProven", message=_described(unproven, lambda _w: text))
    if any(w.eviction_policy_live is None for w in view.reported):
        return Finding(type=name, status="Unknown", reason="NoHeartbeatYet", message="waits for a first heartbeat")
    return Finding(
        type=name, status="True", reason="Proven", message=f"{wanted or 'the policy'} on {len(view.reported)} workers"
    )


def draining(view: View) -> Finding:
    """Workers leave, and wait for their requests."""
    leaving = [w for w in view.workers if w.phase == "Draining"]
    if not leaving:
        return Finding(type="Draining", status="False", reason="NoneLeaves")
    described = _described(leaving, lambda w: f"{w.in_flight or 0} requests under way")
    return Finding(type="Draining", status="True", reason="WorkersLeave", message=described)


def _described(workers: list[WorkerStatus], text: Callable[[WorkerStatus], str]) -> str:
    named = "; ".join(f"{worker.pod}: {text(worker)}" for worker in workers[:_NAMED])
    return named + (f"; and {len(workers) - _NAMED} more" if len(workers) > _NAMED else "")
