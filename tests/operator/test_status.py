"""Status and conditions: what is seen, in words that say what to do."""

from __future__ import annotations

from typing import Any

import pytest

from kvrouting_operator.observed import Observed, Problem
from kvrouting_operator.pool_status import is_settled, pool_status, transitions
from kvrouting_operator.resources.names import ROUTER
from kvrouting_operator.router_report import PoolReport
from kvrouting_operator.spec import PoolSpec
from kvrouting_operator.status import Condition, PoolStatus, plain_status
from tests.operator.pools import (
    NOW,
    live_deployment,
    live_pod,
    objects_of,
    observed_of,
    pool_report,
    raw_pool,
    report_of,
    spec_of,
)

TWO = spec_of(replicas=2)


def seen(spec: PoolSpec = TWO, **parts: Any) -> Observed:
    """A pool of two workers and a router in the best state, but for the given parts."""
    objects = objects_of(spec)
    owned = {
        key: live_deployment(body, replicas=body["spec"]["replicas"])
        for key, body in objects.items()
        if body["kind"] == "Deployment"
    }
    best: dict[str, Any] = {
        "owned": owned,
        "worker_pods": (live_pod("w-1"), live_pod("w-2")),
        "router_pods": (live_pod("r-1", component=ROUTER),),
        "report": pool_report(w_1=report_of(), w_2=report_of()),
    }
    return observed_of(**{**best, **parts})


def status_of(observed: Observed, spec: PoolSpec | None = TWO, *, problems: tuple[Problem, ...] = ()) -> PoolStatus:
    """At the test's moment."""
    return pool_status(spec, observed, problems=problems, outdated=False, now=NOW)


def condition(status: PoolStatus, kind: str) -> Condition:
    """One of the eight."""
    return next(c for c in status.conditions if c.type == kind)


def truths(status: PoolStatus) -> dict[str, tuple[str, str]]:
    """Type → status and reason."""
    return {c.type: (c.status, c.reason) for c in status.conditions}


def test_a_pool_in_the_best_state() -> None:
    status = status_of(seen())
    assert truths(status) == {
        "Ready": ("True", "Ready"),
        "Progressing": ("False", "UpToDate"),
        "WorkersAvailable": ("True", "AllReady"),
        "RouterAvailable": ("True", "AllReady"),
        "EventsFlowing": ("True", "Flowing"),
        "CacheSynced": ("True", "Exact"),
        "EvictionPolicyActive": ("True", "Proven"),
        "Draining": ("False", "NoneLeaves"),
    }
    assert (status.replicas, status.ready_replicas, status.observed_generation) == (2, 2, 1)
    assert status.selector == "app.kubernetes.io/component=worker,kvrouting.dev/pool=llama"
    assert status.endpoint == "http://llama-router.default.svc:80"
    assert is_settled(status)


def test_figures_of_a_worker_are_those_of_the_routers() -> None:
    report = report_of(in_flight=3, cached_tokens=10, unique_cached_tokens=4, capacity_tokens=20, sync_lag_s=0.5)
    first = status_of(seen(report=pool_report(w_1=report, w_2=report_of()))).workers[0]
    assert (first.pod, first.node, first.phase, first.epoch, first.mirror) == ("w-1", "node-a", "Ready", "e1", "exact")
    assert (first.in_flight, first.cached_tokens, first.unique_cached_tokens, first.capacity_tokens) == (3, 10, 4, 20)
    assert (first.sync_lag_seconds, first.eviction_policy, first.eviction_policy_live) == (0.5, "rlt-adaptive", True)


UNSCHEDULED = {
    "phase": "Pending",
    "containerStatuses": [],
    "conditions": [
        {
            "type": "PodScheduled",
            "status": "False",
            "reason": "Unschedulable",
            "message": "0/3 nodes are available: 3 node(s) didn't match Pod's node affinity/selector.",
        }
    ],
}


def waiting(reason: str, message: str, **more: Any) -> dict[str, Any]:
    """The status of a pod whose engine waits."""
    state = {"name": "engine", "ready": False, "state": {"waiting": {"reason": reason, "message": message}}, **more}
    return {"phase": "Pending", "conditions": [], "containerStatuses": [state]}


CRASHING = waiting(
    "CrashLoopBackOff", "back-off", lastState={"terminated": {"exitCode": 1, "message": "no such model\n"}}
)


@pytest.mark.parametrize(
    ("pod_status", "phase", "reason", "words"),
    [
        (UNSCHEDULED, "Pending", "Unschedulable", "didn't match Pod's node affinity"),
        (
            waiting("ImagePullBackOff", "no such image"),
            "Pending",
            "ImagePullBackOff",
            "container engine: no such image",
        ),
        (waiting("CreateContainerConfigError", "secret x"), "Pending", "CreateContainerConfigError", "secret x"),
        (CRASHING, "Failed", "CrashLoopBackOff", "no such model"),
    ],
)
def test_why_a_pod_does_not_run_is_in_status(pod_status: dict[str, Any], phase: str, reason: str, words: str) -> None:
    broken = live_pod("w-2", ready=False, **pod_status)
    status = status_of(seen(worker_pods=(live_pod("w-1"), broken), report=pool_report(w_1=report_of())))
    worker = status.workers[1]
    assert (worker.phase, worker.reason) == (phase, reason)
    assert words in (worker.message or "")
    available = condition(status, "WorkersAvailable")
    assert (available.status, available.reason) == ("False", reason)
    assert words in available.message
    assert condition(status, "Ready").message.endswith("1 of 2 workers are ready")


def test_pods_that_are_not_even_made_are_explained() -> None:
    observed = seen(worker_pods=(), report=PoolReport())
    live = observed.owned["Deployment", "llama-worker"]
    live["status"]["conditions"] = [
        {
            "type": "ReplicaFailure",
            "status": "True",
            "reason": "FailedCreate",
            "message": "pods forbidden: exceeded quota: q",
        }
    ]
    available = condition(status_of(observed), "WorkersAvailable")
    assert (available.status, available.reason) == ("False", "QuotaExceeded")
    assert "exceeded quota: q" in available.message


def test_no_events_is_a_condition_of_its_own() -> None:
    report = pool_report(w_1=report_of(events_flowing=False, mirror="approximate"), w_2=report_of())
    status = status_of(seen(report=report))
    assert truths(status)["EventsFlowing"] == ("False", "NoEvents")
    assert "w-1" in condition(status, "EventsFlowing").message
    assert truths(status)["Ready"] == ("False", "NoEvents")


@pytest.mark.parametrize(
    ("worker", "reason", "words"),
    [
        (report_of(eviction_policy="lru"), "OtherPolicy", "its engine evicts by lru, wanted is rlt-adaptive"),
        (report_of(eviction_live=False), "NotProven", "does not prove rlt-adaptive"),
        (
            report_of(eviction_policy="", eviction_live=False, mirror="partial"),
            "NotProven",
            "does not prove rlt-adaptive",
        ),
    ],
)
def test_an_engine_without_the_policy_is_named(worker: Any, reason: str, words: str) -> None:
    status = status_of(seen(report=pool_report(w_1=worker, w_2=report_of())))
    active = condition(status, "EvictionPolicyActive")
    assert (active.status, active.reason) == ("False", reason)
    assert words in active.message
    assert condition(status, "Ready").status == "False"


def test_a_worker_that_no_router_knows_is_syncing() -> None:
    status = status_of(seen(report=pool_report(w_1=report_of())))
    assert status.workers[1].phase == "Syncing"
    assert truths(status)["CacheSynced"] == ("False", "Syncing")


@pytest.mark.parametrize(("state", "phase"), [("syncing", "Syncing"), ("suspect", "Suspect"), ("draining", "Draining")])
def test_the_routers_word_on_a_worker_counts(state: str, phase: str) -> None:
    status = status_of(seen(report=pool_report(w_1=report_of(state=state, reason="because"), w_2=report_of())))
    assert status.workers[0].phase == phase
    assert status.workers[0].message == "because"


def test_what_no_router_says_is_unknown() -> None:
    status = status_of(seen(report=PoolReport(silent=("r-1: timed out",))))
    for kind in ("EventsFlowing", "CacheSynced", "EvictionPolicyActive"):
        assert truths(status)[kind] == ("Unknown", "NoRouterAnswers")
        assert "timed out" in condition(status, kind).message
    assert condition(status, "Ready").status == "False"
    assert not is_settled(status)


def test_a_leaving_worker_is_draining_and_does_not_count() -> None:
    leaving = live_pod("w-2")
    leaving["metadata"]["deletionTimestamp"] = NOW
    status = status_of(
        seen(
            spec_of(),
            worker_pods=(live_pod("w-1"), leaving),
            report=pool_report(w_1=report_of(), w_2=report_of(in_flight=4)),
        ),
        spec_of(),
    )
    draining = condition(status, "Draining")
    assert (draining.status, draining.reason) == ("True", "WorkersLeave")
    assert "w-2: 4 requests under way" in draining.message
    assert (status.replicas, status.ready_replicas) == (1, 1)
    assert condition(status, "WorkersAvailable").status == "True"
    assert not is_settled(status)


def test_a_pool_without_workers_is_settled_and_not_ready() -> None:
    none = spec_of(replicas=0)
    router = live_pod("r-1", component=ROUTER, ready=False)
    status = status_of(seen(none, worker_pods=(), router_pods=(router,), report=PoolReport(answered=1)), none)
    assert truths(status)["Ready"] == ("False", "ScaledToZero")
    assert truths(status)["WorkersAvailable"] == ("True", "ScaledToZero")
    assert truths(status)["RouterAvailable"] == ("True", "WaitsForWorkers")
    assert is_settled(status)


def test_a_router_that_ends_again_and_again_says_why() -> None:
    state = {"name": "router", "ready": False, "state": {"waiting": {"reason": "CrashLoopBackOff"}}}
    state["lastState"] = {"terminated": {"exitCode": 2, "message": "unknown parameter 'x' of policy lbgr"}}
    router = live_pod("r-1", component=ROUTER, ready=False, containerStatuses=[state])
    available = condition(status_of(seen(router_pods=(router,), report=PoolReport())), "RouterAvailable")
    assert (available.status, available.reason) == ("False", "CrashLoopBackOff")
    assert "unknown parameter 'x'" in available.message


def test_a_rollout_is_progress_until_its_deadline() -> None:
    observed = seen()
    live = observed.owned["Deployment", "llama-worker"]
    live["status"]["updatedReplicas"] = 1
    assert truths(status_of(observed))["Progressing"] == ("True", "RollingOut")
    live["status"]["conditions"] = [{"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded"}]
    assert truths(status_of(observed))["Progressing"] == ("False", "DeadlineExceeded")


def test_routers_that_wait_for_a_worker_are_in_time() -> None:
    observed = seen(worker_pods=(), report=PoolReport(answered=1))
    live = observed.owned["Deployment", "llama-router"]
    live["status"]["conditions"] = [{"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded"}]
    assert truths(status_of(observed))["Progressing"][1] != "DeadlineExceeded"
    late = seen()
    late.owned["Deployment", "llama-router"]["status"]["conditions"] = live["status"]["conditions"]
    assert truths(status_of(late))["Progressing"] == ("False", "DeadlineExceeded")


def test_a_problem_stops_progress_and_leaves_the_rest_as_it_is_seen() -> None:
    problem = Problem(reason="FieldConflict", message='Deployment llama-worker: conflict with "kubectl-edit"')
    status = status_of(seen(), problems=(problem,))
    progressing = condition(status, "Progressing")
    assert (progressing.status, progressing.reason) == ("False", "FieldConflict")
    assert "kubectl-edit" in progressing.message
    assert condition(status, "WorkersAvailable").status == "True"


def test_an_invalid_spec_is_judged_by_what_runs() -> None:
    status = status_of(seen(), None, problems=(Problem(reason="InvalidSpec", message="spec.gpu"),))
    assert truths(status)["Progressing"] == ("False", "InvalidSpec")
    assert truths(status)["WorkersAvailable"] == ("True", "AllReady")


def test_the_time_of_a_condition_is_that_of_its_last_change() -> None:
    first = status_of(seen())
    held = raw_pool(status=plain_status(first))
    later = pool_status(
        TWO, seen(raw=held, report=PoolReport()), problems=(), outdated=False, now="2031-01-01T00:00:00Z"
    )
    times = {c.type: c.last_transition_time for c in later.conditions}
    assert times["WorkersAvailable"] == NOW
    assert times["EventsFlowing"] == "2031-01-01T00:00:00Z"


def test_events_tell_of_changes_and_of_nothing_else() -> None:
    best = status_of(seen())
    assert transitions(plain_status(best), best) == ()
    worse = status_of(seen(report=pool_report(w_1=report_of(events_flowing=False), w_2=report_of())))
    told = {(t.severity, t.reason) for t in transitions(plain_status(best), worse)}
    assert told == {("Warning", "NoEvents")}
    assert {t.severity for t in transitions(plain_status(worse), best)} == {"Normal"}
    assert {t.reason for t in transitions({}, best)} == {"Ready", "AllReady", "Flowing", "Exact", "Proven"}


def test_an_old_template_is_mentioned() -> None:
    status = pool_status(TWO, seen(), problems=(), outdated=True, now=NOW)
    assert "rollout.trigger" in condition(status, "Progressing").message
