"""States, breaker and agreement of workers, without I/O."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from kvrouting_core.identity import WorkerId
from kvrouting_core.routing.events import SchedulerOptions
from kvrouting_router.agreement import Agreement
from kvrouting_router.breaker import Breaker
from kvrouting_router.options import BreakerOptions, SyncOptions
from kvrouting_router.worker_registry import (
    Mirror,
    Vitals,
    WorkerFacts,
    WorkerRegistry,
    WorkerState,
)

# --- breaker ---


def test_a_breaker_opens_after_failures_in_a_row_and_probes_in_growing_pauses() -> None:
    breaker = Breaker(BreakerOptions(failures=3, probe_s=1.0, max_probe_s=3.0))
    breaker.failed("a", now_s=0)
    breaker.failed("b", now_s=0)
    breaker.succeeded()
    breaker.failed("c", now_s=1)
    breaker.failed("d", now_s=2)
    assert not breaker.is_open
    breaker.failed("e", now_s=3)
    assert breaker.is_open
    assert "e" in breaker.reason
    due = []
    now = 3.0
    while len(due) < 4:
        now += 0.5
        if breaker.probe_is_due(now_s=now):
            due.append(now)
            breaker.probed(healthy=False, now_s=now)
    assert due == [4.0, 6.0, 9.0, 12.0]
    breaker.probed(healthy=True, now_s=now)
    assert not breaker.is_open
    for _ in range(3):
        breaker.failed("again", now_s=now)
    assert not breaker.probe_is_due(now_s=now + 2.9)  # the pause is short again only after a real success
    breaker.succeeded()
    assert not breaker.is_open


# --- states ---


def facts(name: str = "w/0", **changes: Any) -> WorkerFacts:
    values: dict[str, Any] = {
        "worker": WorkerId(name),
        "pod_uid": name.split("/", maxsplit=1)[0],
        "dp_rank": 0,
        "dp_size": 1,
        "epoch": "e1",
        "endpoint": f"http://{name.replace('/', '-')}:1",
        "worker_class": "L40",
        "capacity_tokens": 100,
        "mirror": Mirror.EXACT,
        "scheduler": SchedulerOptions(),
    }
    return WorkerFacts(**values | changes)


def registry() -> WorkerRegistry:
    sync = SyncOptions(heartbeat_interval_s=1, silence_s=10, gone_s=60)
    return WorkerRegistry(sync=sync, breaker=BreakerOptions(failures=2), block_size_tokens=16)


def vitals(*, healthy: bool = True, reason: str = "", eviction: str = "rlt", proven: bool = True) -> Vitals:
    return Vitals(
        engine_healthy=healthy,
        events_flowing=True,
        end_to_end_verified=True,
        reason=reason,
        blocks=0,
        cached_tokens=0,
        eviction_policy=eviction,
        eviction_proven_live=proven,
        mirror=Mirror.EXACT,
        load=None,
    )


def test_a_worker_is_silent_only_after_the_limit() -> None:
    workers = registry()
    worker = workers.introduce(facts(), now_s=0)
    worker.synced = True
    changes = [(now, change.new) for now in (0, 9.9, 10, 30, 59.9, 60, 61) for change in workers.refresh(now_s=now)]
    assert changes == [(0, WorkerState.LIVE), (10, WorkerState.SUSPECT), (60, WorkerState.GONE)]
    assert len(workers) == 0


def test_the_state_follows_from_the_facts_in_their_order() -> None:
    workers = registry()
    worker = workers.introduce(facts(), now_s=0)

    def state(now_s: float = 1) -> tuple[str, str]:
        workers.refresh(now_s=now_s)
        return worker.state.value, worker.reason

    assert state() == ("syncing", "waits for its snapshot")
    worker.synced = True
    assert state() == ("live", "")
    worker.vitals = vitals(reason="gap in the events")
    assert state() == ("live", "gap in the events")
    worker.vitals = vitals(healthy=False)
    assert state() == ("suspect", "its engine is not healthy")
    worker.breaker.failed("boom", now_s=1)
    worker.breaker.failed("boom", now_s=1)
    assert state()[1] == "2 attempts in a row failed, the last one: boom"
    worker.draining = "draining: rollout"
    assert state() == ("draining", "draining: rollout")
    worker.left = "its address has changed hands"
    assert state() == ("gone", "its address has changed hands")


def test_a_worker_that_must_prove_its_eviction_policy_is_live_only_while_it_does() -> None:
    workers = registry()
    worker = workers.introduce(facts(required_eviction="rlt"), now_s=0)

    def state() -> tuple[str, str]:
        workers.refresh(now_s=1)
        return worker.state.value, worker.reason

    assert state() == ("syncing", "waits for its snapshot")
    worker.synced = True
    unproven = "its engine does not prove the eviction policy rlt at work"
    assert state() == ("suspect", f"{unproven}: it proves none")
    worker.vitals = vitals(eviction="lru")
    assert state() == ("suspect", f"{unproven}: it proves lru")
    worker.vitals = vitals()
    assert state() == ("live", "")
    worker.vitals = vitals(proven=False)
    assert state() == ("suspect", f"{unproven}: it proves none")


def test_a_proof_that_comes_with_the_introduction_is_enough() -> None:
    workers = registry()
    worker = workers.introduce(facts(required_eviction="rlt", proven_eviction="rlt"), now_s=0)
    worker.synced = True
    workers.refresh(now_s=0)
    assert worker.state is WorkerState.LIVE


def test_without_a_requirement_no_proof_is_asked_for() -> None:
    workers = registry()
    worker = workers.introduce(facts(), now_s=0)
    worker.synced = True
    worker.vitals = vitals(eviction="lru", proven=False)
    workers.refresh(now_s=0)
    assert worker.state is WorkerState.LIVE


def test_the_same_epoch_keeps_what_is_known_and_a_new_one_does_not() -> None:
    workers = registry()
    worker = workers.introduce(facts(), now_s=0)
    worker.synced = True
    workers.refresh(now_s=0)
    assert workers.introduce(facts(), now_s=5) is worker
    assert worker.last_seen_s == 5
    fresh = workers.introduce(facts(epoch="e2"), now_s=6)
    assert fresh is not worker
    assert (fresh.state, fresh.restarted, fresh.synced) == (WorkerState.SYNCING, True, False)


def test_an_address_has_one_owner_per_rank() -> None:
    workers = registry()
    workers.introduce(facts("a/0", endpoint="http://x:1"), now_s=0)
    same = facts("b/0", endpoint="http://x:1")
    other_rank = facts("a/1", endpoint="http://x:1", dp_rank=1, dp_size=2)
    assert [w.facts.worker for w in workers.sharing_endpoint(same)] == ["a/0"]
    assert list(workers.sharing_endpoint(other_rank)) == []
    assert list(workers.sharing_endpoint(facts("a/0", endpoint="http://x:1"))) == []


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"endpoint": "x:1"}, "http://host:port, got 'x:1'"),
        ({"capacity_tokens": 0}, "capacity_tokens of w/0 must be at least 1, got 0"),
        ({"dp_rank": 2, "dp_size": 2}, "dp_rank 2 of w/0 must be below dp_size 2"),
    ],
)
def test_facts_that_make_no_sense_are_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        facts(**changes)


# --- agreement ---


def observed(reports: Sequence[int], *, matched: int = 640, credited: int = 640) -> Agreement:
    agreement = Agreement(block_size_tokens=64)
    for reported in reports:
        agreement.observe(
            matched_tokens=matched, credited_tokens=credited, reported_tokens=reported, prompt_tokens=1000
        )
    return agreement


def test_few_disagreements_are_no_mismatch_and_many_are() -> None:
    assert not observed([0] * 19).is_mismatched
    assert observed([0] * 20).is_mismatched
    assert not observed([0] * 5 + [640] * 60).is_mismatched
    assert observed([640] * 60 + [0] * 60).is_mismatched


def test_part_of_a_block_and_in_flight_credit_are_no_disagreement() -> None:
    assert observed([703, 577, 640] * 20).disagreement == 0
    assert observed([900] * 60, credited=900).disagreement == 0
    assert observed([900] * 60).is_mismatched
