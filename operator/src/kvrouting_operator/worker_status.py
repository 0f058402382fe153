"""The status of one worker: from its live pod, and what the routers say of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kvrouting_operator.observed import condition_of, has_condition
from kvrouting_operator.router_report import PoolReport, WorkerReport
from kvrouting_operator.status import Phase, WorkerStatus

# Waiting reasons of a container that is only on its way.
_ON_ITS_WAY = {"PodInitializing", "ContainerCreating", ""}
_MESSAGE_LIMIT = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class PodTrouble:
    """Why a pod does not run. reason: as Kubernetes calls it."""

    phase: Phase
    reason: str
    message: str


def worker_status(pod: Mapping[str, Any], report: PoolReport) -> WorkerStatus:
    """report: of the whole pool."""
    known = report.workers.get(pod["metadata"]["uid"])
    phase, reason, message = _phase(pod, known, answered=report.answered > 0)
    figures: dict[str, Any] = {}
    if known is not None:
        figures = {
            "epoch": known.epoch or None,
            "mirror": known.mirror,
            "cached_tokens": known.cached_tokens,
            "unique_cached_tokens": known.unique_cached_tokens,
            "capacity_tokens": known.capacity_tokens,
            "in_flight": known.in_flight,
            "sync_lag_seconds": known.sync_lag_s,
            "eviction_policy": known.eviction_policy or None,
            "eviction_policy_live": known.eviction_live,
        }
    return WorkerStatus(
        pod=pod["metadata"]["name"],
        node=pod["spec"].get("nodeName"),
        phase=phase,
        reason=reason or None,
        message=message[:_MESSAGE_LIMIT] or None,
        **figures,
    )


def _phase(pod: Mapping[str, Any], known: WorkerReport | None, *, answered: bool) -> tuple[Phase, str, str]:
    if "deletionTimestamp" in pod["metadata"]:
        return "Draining", "Leaving", f"{known.in_flight} requests under way" if known else ""
    trouble = pod_trouble(pod)
    if trouble is not None:
        return trouble.phase, trouble.reason, trouble.message
    if not has_condition(pod, "Ready"):
        return "Starting", "NotReady", _unready(pod, known)
    if known is None:
        return ("Syncing", "UnknownToRouters", "no router knows it yet") if answered else ("Ready", "", "")
    if known.state == "live":
        return "Ready", "", ""
    if known.state == "draining":
        return "Draining", "Draining", known.reason
    if known.state == "syncing":
        return "Syncing", "Syncing", known.reason
    return "Suspect", "Suspect", known.reason


def _unready(pod: Mapping[str, Any], known: WorkerReport | None) -> str:
    names = [s["name"] for s in _container_statuses(pod) if not s.get("ready", False)]
    waits = f"waits for {', '.join(sorted(set(names)))}" if names else "waits for its containers"
    if known is not None and known.eviction_live is False:
        waits += (
            f"; its engine does not prove its eviction policy at work (it reports {known.eviction_policy or 'none'})"
        )
    return waits


def pod_trouble(pod: Mapping[str, Any]) -> PodTrouble | None:
    """Why a pod has no node or no running container; None while it runs or is on its way."""
    status = pod.get("status", {})
    scheduled = condition_of(pod, "PodScheduled")
    if scheduled.get("status") == "False":
        return PodTrouble(
            phase="Pending", reason=scheduled.get("reason", "Unschedulable"), message=scheduled.get("message", "")
        )
    if status.get("phase") in ("Failed", "Succeeded"):
        return PodTrouble(phase="Failed", reason=status.get("reason", "Failed"), message=status.get("message", ""))
    for container in _container_statuses(pod):
        trouble = _container_trouble(container)
        if trouble is not None:
            return trouble
    if status.get("phase", "Pending") == "Pending":
        return PodTrouble(phase="Pending", reason="Starting", message="its containers are being made")
    return None


def _container_trouble(container: Mapping[str, Any]) -> PodTrouble | None:
    state, name = container.get("state", {}), container["name"]
    waiting = state.get("waiting", {})
    last = container.get("lastState", {}).get("terminated", {})
    reason = waiting.get("reason", "")
    if reason == "CrashLoopBackOff":
        said = last.get("message", "").strip() or f"exit code {last.get('exitCode', '?')}"
        return PodTrouble(phase="Failed", reason=reason, message=f"container {name} ends again and again: {said}")
    if waiting and reason not in _ON_ITS_WAY:
        return PodTrouble(phase="Pending", reason=reason, message=f"container {name}: {waiting.get('message', reason)}")
    ended = state.get("terminated", {})
    if ended and ended.get("exitCode", 0) != 0:
        said = ended.get("message", "").strip() or f"exit code {ended['exitCode']}"
        return PodTrouble(
            phase="Failed", reason=ended.get("reason", "Error"), message=f"container {name} ended: {said}"
        )
    return None


def _container_statuses(pod: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Of init containers only those that failed or go on running count: one that has done its work is not ready."""
    status = pod.get("status", {})
    for container in status.get("initContainerStatuses", []):
        if container.get("state", {}).get("terminated", {}).get("exitCode", 1) != 0:
            yield container
    yield from status.get("containerStatuses", [])
