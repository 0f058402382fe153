"""Policies, workers and clients on the virtual clock."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from kvrouting_core.identity import WorkerId
from kvrouting_core.prefix_index import PrefixIndex
from kvrouting_core.routing.decision import Action, Refusal
from kvrouting_core.routing.events import (
    Arrival,
    Event,
    LoadReport,
    Outcome,
    SchedulerOptions,
    WorkerJoined,
    WorkerPaused,
)
from kvrouting_core.routing.policy import AdmissionLimits, WorkerBelief
from kvrouting_core.routing.registry import POLICY_NAMES, build_policy
from kvrouting_core.service_time import worker_class
from kvrouting_simulator.experiment import (
    Delays,
    Failure,
    PolicyStuckError,
    Scenario,
    Simulation,
    WorkerSpec,
    simulate,
)
from kvrouting_simulator.experiment.clock import VirtualClock
from kvrouting_simulator.report import RequestRecord, Run
from kvrouting_simulator.workloads import Gsp, MultiTurn, PoissonArrivals
from tests.fakes.waiting_policy import OneAtATime

TIMES = worker_class("L40").times


def small_gsp(**more: object) -> Gsp:
    return Gsp(groups=8, prompts_per_group=8, lengths_tokens=(128, 512), **more)  # type: ignore[arg-type]


def scenario(**more: object) -> Scenario:
    values: dict[str, object] = {
        "workload": small_gsp(),
        "workers": [WorkerSpec(capacity_tokens=4000, page_size=16)] * 3,
        "policy": "cache_aware",
        **more,
    }
    return Scenario(**values)  # type: ignore[arg-type]


def by_id(run: Run) -> dict[str, RequestRecord]:
    return {record.request_id: record for record in run.records}


class Never(OneAtATime):
    """Takes requests and never sends one."""

    def __init__(self) -> None:
        super().__init__()
        self._kept = 0

    def handle(self, event: Event, *, now_ms: float) -> Sequence[Action]:
        self._kept += isinstance(event, Arrival)
        return []

    @property
    def waiting(self) -> int:
        return self._kept


class Watched:
    """A policy that remembers what it was told."""

    def __init__(self, name: str, index: PrefixIndex) -> None:
        self._policy = build_policy(
            name, {}, cache=index, block_size_tokens=64, rng=random.Random(1), limits=AdmissionLimits()
        )
        self.name = name
        self.told: list[tuple[float, Event, Sequence[Action]]] = []

    def handle(self, event: Event, *, now_ms: float) -> Sequence[Action]:
        actions = self._policy.handle(event, now_ms=now_ms)
        self.told.append((now_ms, event, actions))
        return actions

    @property
    def waiting(self) -> int:
        return self._policy.waiting

    def in_flight(self, worker: WorkerId) -> int:
        return self._policy.in_flight(worker)

    def beliefs(self, *, now_ms: float) -> Sequence[WorkerBelief]:
        return self._policy.beliefs(now_ms=now_ms)


def test_a_lone_request_sees_the_network_its_prefill_and_its_decodes() -> None:
    spec = Gsp(groups=1, prompts_per_group=1, lengths_tokens=(512,), output_tokens=3)
    run = simulate(scenario(workload=spec, workers=[WorkerSpec()], policy="random"))
    (record,) = run.records
    first = 1 + TIMES.prefill_ms([(0, 512)]) + 1
    assert record.first_token_ms == pytest.approx(first)
    assert record.end_ms == pytest.approx(first + TIMES.decode_ms(1, 513) + TIMES.decode_ms(1, 514))
    assert (record.prompt_tokens, record.cached_tokens, record.output_tokens) == (512, 0, 3)
    assert record.outcome is Outcome.COMPLETED
    busy = run.summary.workers[0].busy_ms
    assert busy == pytest.approx(record.end_ms - 2, abs=0.01)


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_every_policy_serves_every_request(policy: str) -> None:
    run = simulate(scenario(policy=policy))
    assert run.summary.completed == run.summary.requests == 64
    assert all(record.output_tokens == 4 for record in run.records)


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_same_scenario_and_seed_give_the_same_records(policy: str) -> None:
    one = scenario(policy=policy, workers=[WorkerSpec(capacity_tokens=2000, eviction="rlt")] * 3)
    assert simulate(one) == simulate(one)
    assert simulate(one).records != simulate(replace(one, seed=2)).records


def test_ties_may_fall_otherwise_under_the_same_requests() -> None:
    one = scenario(policy="random", workers=[WorkerSpec()] * 3)
    runs = [by_id(simulate(replace(one, tie_seed=tie_seed))) for tie_seed in (None, one.seed, 7)]
    assert runs[0] == runs[1]
    plans = [{i: (r.arrival_ms, r.prompt_tokens) for i, r in run.items()} for run in runs]
    assert plans[1] == plans[2]
    assert {i: r.worker for i, r in runs[1].items()} != {i: r.worker for i, r in runs[2].items()}


def test_arrivals_and_prompts_do_not_depend_on_the_policy() -> None:
    runs = [by_id(simulate(scenario(policy=policy))) for policy in ("random", "lbgr")]
    plans = [{i: (r.arrival_ms, r.prompt_tokens) for i, r in run.items()} for run in runs]
    assert plans[0] == plans[1]


def test_a_prefix_brings_its_group_to_the_worker_that_holds_it() -> None:
    spec = small_gsp(order="grouped", arrivals=PoissonArrivals(rate_per_s=2))
    run = simulate(scenario(workload=spec, policy="lbgr", policy_parameters={"exploration_share": 0}))
    records = by_id(run)
    for group in range(1, 8, 2):
        workers = {records[f"gsp-{group}-{prompt}"].worker for prompt in range(8)}
        assert len(workers) == 1
    assert run.summary.hit_rate == pytest.approx(0.5 * 7 / 8, abs=0.02)


def test_conversations_wait_for_their_answers_and_find_them_cached() -> None:
    spec = MultiTurn(conversations=4, turns=(3,), turn_tokens=100, output_tokens=5)
    run = simulate(scenario(workload=spec, workers=[WorkerSpec(page_size=1)], policy="random"))
    records = by_id(run)
    for conversation in range(4):
        turns = [records[f"chat-{conversation}-{turn}"] for turn in range(3)]
        assert [t.prompt_tokens for t in turns] == [100, 205, 310]
        # The last token of an answer was never fed back: it has no KV.
        assert [t.cached_tokens for t in turns] == [0, 104, 209]
        assert turns[0].end_ms <= turns[1].arrival_ms
        assert turns[1].end_ms <= turns[2].arrival_ms


def test_the_paper_loop_runs_to_its_end() -> None:
    spec = MultiTurn(conversations=8, turns=(2,), turn_tokens=64, loop="paper", concurrency=8)
    run = simulate(scenario(workload=spec, policy="lbgr"))
    assert run.summary.completed == run.summary.requests >= 16


def test_a_policy_that_keeps_requests_is_served_when_it_lets_them_go() -> None:
    policy = OneAtATime()
    spec = scenario(workload=small_gsp(arrivals=PoissonArrivals(rate_per_s=1000)))
    result = Simulation(spec, policy=policy, index=PrefixIndex()).run()
    assert len(result.records) == 64
    assert all(record.outcome is Outcome.COMPLETED for record in result.records)
    assert policy.waiting == 0


def test_a_policy_that_never_sends_is_an_error_and_no_endless_loop() -> None:
    with pytest.raises(PolicyStuckError, match="has kept 64 requests for 36"):
        Simulation(scenario(), policy=Never(), index=PrefixIndex()).run()


def test_requests_before_the_first_byte_go_to_another_worker_and_later_ones_are_cut() -> None:
    spec = Gsp(groups=20, prompts_per_group=1, lengths_tokens=(2048,), output_tokens=60)
    steady = scenario(workload=spec, policy="round_robin", workers=[WorkerSpec()] * 2)
    run = simulate(replace(steady, failures=[Failure(worker=0, killed_ms=900)]))
    cut = [r for r in run.records if r.outcome is Outcome.FAILED]
    assert cut
    assert all(r.error_kind == "cut" and r.worker == "w0/0" and r.first_token_ms is not None for r in cut)
    assert all(r.first_token_ms < 902 and r.end_ms == 901 for r in cut if r.first_token_ms is not None)
    rest = [r for r in run.records if r.outcome is not Outcome.FAILED]
    assert len(rest) + len(cut) == 20
    assert all(r.outcome is Outcome.COMPLETED for r in rest)
    assert all(r.worker == "w1/0" for r in rest if r.end_ms > 901)
    retried = [r for r in rest if by_id(simulate(steady))[r.request_id].worker == "w0/0" and r.worker == "w1/0"]
    assert any(r.arrival_ms < 900 for r in retried)
    assert [(m.kind, m.at_ms) for m in run.marks] == [("killed", 900)]


def test_a_client_that_sends_cut_requests_again_loses_none() -> None:
    spec = Gsp(groups=20, prompts_per_group=1, lengths_tokens=(2048,), output_tokens=60)
    steady = scenario(workload=spec, policy="round_robin", workers=[WorkerSpec()] * 2)
    fault = replace(steady, failures=[Failure(worker=0, killed_ms=900)])
    cut = {r.request_id for r in simulate(fault).records if r.outcome is Outcome.FAILED}
    records = by_id(simulate(replace(fault, resubmissions=1)))
    assert all(r.outcome is Outcome.COMPLETED for r in records.values())
    assert {name for name, r in records.items() if r.resubmissions} == cut
    for name in cut:
        again = records[name]
        assert (again.worker, again.output_tokens) == ("w1/0", 60)
        assert again.first_token_ms is not None
        assert again.arrival_ms < 900 < again.first_token_ms


def test_a_worker_that_returns_is_empty_and_serves_again() -> None:
    spec = scenario(
        policy="round_robin", workers=[WorkerSpec()] * 2, failures=[Failure(worker=0, killed_ms=1000, back_ms=2000)]
    )
    index = PrefixIndex()
    watched = Watched("round_robin", index)
    result = Simulation(spec, policy=watched, index=index).run()
    lifecycle = [
        (now, type(event)) for now, event, _ in watched.told if isinstance(event, (WorkerPaused, WorkerJoined))
    ]
    assert lifecycle == [(0, WorkerJoined), (0, WorkerJoined), (1001, WorkerPaused), (2001, WorkerJoined)]
    served = [r for r in result.records if r.worker == "w0/0"]
    assert [r for r in served if r.arrival_ms > 2001]
    assert not [r for r in served if 1001 < r.arrival_ms < 2001]
    assert len(result.records) == 64


def test_with_no_worker_left_requests_are_refused() -> None:
    run = simulate(scenario(workers=[WorkerSpec()], policy="random", failures=[Failure(worker=0, killed_ms=500)]))
    refused = [r for r in run.records if r.error_kind == "no_worker"]
    assert len(refused) > 30
    assert all(r.outcome is Outcome.REJECTED and r.worker is None for r in refused)


def test_a_request_that_fits_no_engine_is_the_clients_fault() -> None:
    run = simulate(scenario(workers=[WorkerSpec(capacity_tokens=300)], policy="random"))
    kinds = {r.prompt_tokens: (r.outcome, r.error_kind) for r in run.records}
    assert kinds == {128: (Outcome.COMPLETED, None), 512: (Outcome.REJECTED, "too_long")}


def test_the_index_follows_a_cache_after_its_delay() -> None:
    index = PrefixIndex()
    watched = Watched("cache_aware", index)
    spec = Gsp(groups=1, prompts_per_group=1, lengths_tokens=(640,), output_tokens=9)
    Simulation(scenario(workload=spec, workers=[WorkerSpec()]), policy=watched, index=index).run()
    assert index.count(WorkerId("w0/0")) == 10
    arrived = [now for now, event, _ in watched.told if type(event).__name__ == "PrefixArrived"]
    assert arrived == [pytest.approx(1 + TIMES.prefill_ms([(0, 640)]) + 5)]


def reports(delays: Delays) -> list[tuple[float, LoadReport]]:
    index = PrefixIndex()
    watched = Watched("lbgr", index)
    Simulation(scenario(workers=[WorkerSpec()], delays=delays), policy=watched, index=index).run()
    return [(now, event) for now, event, _ in watched.told if isinstance(event, LoadReport)]


def test_load_is_reported_once_a_second_and_on_changes_if_asked() -> None:
    regular = reports(Delays(hop_ms=2))
    assert [now for now, _ in regular] == [1000 * (i + 1) + 2 for i in range(len(regular))]
    assert all(report.reported_ms == now - 2 for now, report in regular)
    busy = [report.total_prefill_busy_us for _, report in regular]
    assert busy == sorted(busy)
    assert busy[-1] > 0
    assert len(reports(Delays(report_on_change=True))) > 5 * len(regular)


def test_reports_stay_away_only_while_they_would_repeat_themselves() -> None:
    index = PrefixIndex()
    watched = Watched("lbgr", index)
    spec = Gsp(groups=1, prompts_per_group=2, lengths_tokens=(512,), arrivals=PoissonArrivals(rate_per_s=1e-9))
    result = Simulation(scenario(workload=spec, workers=[WorkerSpec()] * 2), policy=watched, index=index).run()
    second = max(record.arrival_ms for record in result.records)
    assert second > 1e9
    last_seen = [now for now, event, _ in watched.told if isinstance(event, LoadReport) and event.worker == "w0/0"]
    assert last_seen[:10] == [1000 * (i + 1) + 1 for i in range(10)]
    before = [now for now in last_seen if now < second]
    assert second - before[-1] <= 1001
    assert (before[-1] - 1) % 1000 == 0
    assert len(before) < 4000


def test_a_slow_worker_takes_longer_and_reports_it() -> None:
    spec = Gsp(groups=1, prompts_per_group=1, lengths_tokens=(512,), output_tokens=1)
    fast, slow = (
        simulate(scenario(workload=spec, workers=[WorkerSpec(slow_factor=factor)], policy="random"))
        for factor in (1.0, 3.0)
    )
    assert slow.records[0].end_ms - 2 == pytest.approx(3 * (fast.records[0].end_ms - 2))
    assert slow.summary.workers[0].busy_ms == pytest.approx(3 * (fast.records[0].end_ms - 2), abs=0.01)


def test_the_schedulers_options_reach_the_engine() -> None:
    spec = small_gsp(arrivals=PoissonArrivals(rate_per_s=100), output_tokens=30)
    ends = {
        options: simulate(
            scenario(workload=spec, workers=[WorkerSpec(scheduler=options)], policy="random")
        ).summary.latency
        for options in (
            SchedulerOptions(),
            SchedulerOptions(max_running_requests=2),
            SchedulerOptions(prefill_decode_interval=4),
            SchedulerOptions(mixed_chunk=True),
        )
    }
    assert len({latency.p50 for latency in ends.values() if latency}) == 4


def test_too_many_waiting_requests_are_refused_when_the_policy_says_so() -> None:
    limits = AdmissionLimits(max_in_flight_per_worker=2)
    spec = small_gsp(arrivals=PoissonArrivals(rate_per_s=1000))
    run = simulate(scenario(workload=spec, limits=limits, workers=[WorkerSpec()], policy="random"))
    assert run.summary.refused > 0
    assert run.summary.refused + run.summary.completed == 64
    assert {r.error_kind for r in run.records} == {None, "overloaded"}


def test_the_clock_refuses_the_past() -> None:
    clock = VirtualClock()
    clock.at(5, lambda: clock.at(4, lambda: None))
    with pytest.raises(ValueError, match="cannot plan at 4 ms, it is 5 ms"):
        clock.run()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"workers": []}, "workers is empty"),
        ({"block_tokens": 8}, "routing block size 8"),
        ({"max_attempts": 0}, "max_attempts must be at least 1, got 0"),
        ({"failures": [Failure(worker=3, killed_ms=1)]}, "failures.worker 3 is not among the 3 workers"),
    ],
)
def test_scenarios_without_sense_are_refused(more: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        scenario(**more)


def test_refusals_are_actions_of_the_policy() -> None:
    index = PrefixIndex()
    watched = Watched("random", index)
    spec = scenario(workers=[WorkerSpec()], failures=[Failure(worker=0, killed_ms=0)])
    Simulation(spec, policy=watched, index=index).run()
    refusals = [a for _, _, actions in watched.told for a in actions if isinstance(a, Refusal)]
    assert len(refusals) >= 63
