"""The status of a pool and the events of its changes, from what is seen. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kvrouting_operator.conditions import Finding, View, findings
from kvrouting_operator.observed import Observed, Problem, is_leaving
from kvrouting_operator.resources.names import WORKER, selector_labels, selector_text
from kvrouting_operator.resources.services import endpoint
from kvrouting_operator.spec import PoolSpec
from kvrouting_operator.status import Condition, PoolStatus
from kvrouting_operator.worker_status import worker_status

# A condition that is True and should not be, or the other way round.
_GOOD_WHEN_FALSE = {"Progressing", "Draining"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Transition:
    """A condition's status changed: it becomes an event."""

    severity: Literal["Normal", "Warning"]
    reason: str
    message: str


def pool_status(
    spec: PoolSpec | None, observed: Observed, *, problems: tuple[Problem, ...], outdated: bool, now: str
) -> PoolStatus:
    """spec: None if it is invalid. problems: of this round. now: RFC 3339, for conditions that change."""
    workers = tuple(
        sorted((worker_status(p, observed.report) for p in observed.worker_pods), key=lambda worker: worker.pod)
    )
    view = View(observed=observed, spec=spec, workers=workers, problems=problems, outdated=outdated)
    pool, previous = observed.identity, observed.raw.get("status", {})
    return PoolStatus(
        observed_generation=pool.generation,
        replicas=sum(not is_leaving(pod) for pod in observed.worker_pods),
        ready_replicas=view.ready,
        selector=selector_text(selector_labels(pool.name, WORKER)),
        endpoint=endpoint(pool, spec.router.service) if spec else str(previous.get("endpoint", "")),
        workers=workers,
        conditions=tuple(_dated(f, previous, pool.generation, now) for f in findings(view)),
    )


def _dated(finding: Finding, previous: Mapping[str, Any], generation: int, now: str) -> Condition:
    held = _held(previous, finding.type)
    same = held.get("status") == finding.status
    return Condition(
        type=finding.type,
        status=finding.status,
        reason=finding.reason,
        message=finding.message,
        last_transition_time=held["lastTransitionTime"] if same else now,
        observed_generation=generation,
    )


def _held(previous: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    return next((c for c in previous.get("conditions", []) if c["type"] == kind), {})


def transitions(previous: Mapping[str, Any], status: PoolStatus) -> tuple[Transition, ...]:
    """One for each condition whose status changed, and for a new reason why the pool cannot progress."""
    found = []
    for condition in status.conditions:
        held = _held(previous, condition.type)
        stuck = (
            condition.type == "Progressing"
            and condition.status == "False"
            and condition.reason not in (held.get("reason"), "UpToDate")
        )
        # What a new pool does not have yet is no news.
        is_news = held.get("status") != condition.status if held else condition.status == "True"
        if is_news or stuck:
            found.append(_transition(condition))
    return tuple(found)


def _transition(condition: Condition) -> Transition:
    if condition.type in _GOOD_WHEN_FALSE:
        good = condition.status == "True" or condition.reason in ("UpToDate", "NoneLeaves")
    else:
        good = condition.status != "False" or condition.reason == "ScaledToZero"
    text = f"{condition.type} is {condition.status}" + (f": {condition.message}" if condition.message else "")
    return Transition(severity="Normal" if good else "Warning", reason=condition.reason, message=text[:1000])


def is_settled(status: PoolStatus) -> bool:
    """Whether nothing is under way: the next look can wait for a change or for the regular round."""
    held = {condition.type: condition for condition in status.conditions}
    quiet = held["Progressing"].status == "False" and held["Draining"].status == "False"
    return quiet and (held["Ready"].status == "True" or held["Ready"].reason == "ScaledToZero")
