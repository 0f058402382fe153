"""What was seen of a pool at one moment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvrouting_operator.pool import Object, PoolIdentity, PoolKeys
from kvrouting_operator.router_report import PoolReport


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """Something that keeps the operator from doing what the spec asks. reason: one word, for conditions."""

    reason: str
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Observed:
    """owned: (kind, name) → live object that this incarnation of the pool controls. raw: the pool's own object.
    keys: None if there are none and none could be made; then a problem says why.
    """

    identity: PoolIdentity
    raw: Mapping[str, Any]
    keys: PoolKeys | None
    native_sidecar: bool
    owned: Mapping[tuple[str, str], Object] = field(default_factory=dict)
    worker_pods: tuple[Object, ...] = ()
    router_pods: tuple[Object, ...] = ()
    report: PoolReport = field(default_factory=PoolReport)
    problems: tuple[Problem, ...] = ()

    def live(self, kind: str, name: str) -> Object | None:
        """A live object of the pool; None if there is none."""
        return self.owned.get((kind, name))


def is_leaving(pod: Mapping[str, Any]) -> bool:
    """Whether the pod is being deleted, or has ended for good."""
    return "deletionTimestamp" in pod["metadata"] or pod.get("status", {}).get("phase") in ("Succeeded", "Failed")


def has_condition(pod: Mapping[str, Any], kind: str) -> bool:
    """Whether a condition of the object is True."""
    return condition_of(pod, kind).get("status") == "True"


def condition_of(thing: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    """A condition of an object; empty if it has none of that type."""
    conditions = thing.get("status", {}).get("conditions") or []
    return next((c for c in conditions if c["type"] == kind), {})
