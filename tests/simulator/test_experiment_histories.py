"""Whatever dies and returns: every request ends once, and the policy is left with nothing."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from kvrouting_core.identity import WorkerId
from kvrouting_core.prefix_index import PrefixIndex
from kvrouting_core.routing.events import Outcome, SchedulerOptions
from kvrouting_core.routing.policy import AdmissionLimits
from kvrouting_core.routing.registry import POLICY_NAMES, build_policy
from kvrouting_simulator.experiment import Delays, Failure, Scenario, Simulation, WorkerSpec, simulate
from kvrouting_simulator.workloads import Gsp, PoissonArrivals


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    failures = []
    for worker in range(3):
        if draw(st.booleans()):
            killed = draw(st.integers(0, 3000))
            back = draw(st.one_of(st.none(), st.integers(1, 1500)))
            failures.append(Failure(worker=worker, killed_ms=killed, back_ms=None if back is None else killed + back))
    return Scenario(
        workload=Gsp(
            groups=6,
            prompts_per_group=6,
            lengths_tokens=(32, 400),
            output_tokens=draw(st.sampled_from([1, 12])),
            arrivals=PoissonArrivals(rate_per_s=draw(st.sampled_from([15, 200]))),
        ),
        workers=[
            WorkerSpec(
                capacity_tokens=draw(st.sampled_from([380, 900, 5000])),
                page_size=draw(st.sampled_from([1, 16, 64])),
                eviction=draw(st.sampled_from(["lru", "rlt", "slru"])),
                scheduler=SchedulerOptions(mixed_chunk=draw(st.booleans()), chunked_prefill_tokens=256),
            )
            for _ in range(3)
        ],
        policy=draw(st.sampled_from(POLICY_NAMES)),
        limits=AdmissionLimits(max_in_flight_per_worker=draw(st.sampled_from([3, 4096]))),
        delays=Delays(report_on_change=draw(st.booleans()), hop_ms=draw(st.sampled_from([0.0, 1.0, 30.0]))),
        failures=failures,
        seed=draw(st.integers(0, 50)),
    )


@settings(max_examples=60, deadline=None)
@given(scenarios())
def test_every_request_is_recorded_once_and_released(scenario: Scenario) -> None:
    index = PrefixIndex()
    policy = build_policy(
        scenario.policy,
        {},
        cache=index,
        block_size_tokens=scenario.block_tokens,
        rng=random.Random(1),
        limits=scenario.limits,
    )
    result = Simulation(scenario, policy=policy, index=index).run()
    assert len(result.records) == len({r.request_id for r in result.records}) == 36
    workers = [WorkerId(f"w{i}/0") for i in range(3)]
    assert policy.waiting == 0
    assert [policy.in_flight(worker) for worker in workers] == [0, 0, 0]
    for load in result.loads.values():
        assert (load.running_requests, load.waiting_requests, load.used_tokens) == (0, 0, 0)
    if not scenario.failures:
        assert not [r for r in result.records if r.outcome is Outcome.FAILED]


def test_lbgr_finds_more_of_the_same_requests_cached_than_chance() -> None:
    workload = Gsp(requests=600)
    workers = [WorkerSpec(page_size=64)] * 4
    runs = {
        policy: simulate(Scenario(workload=workload, workers=workers, policy=policy)).summary
        for policy in ("random", "lbgr")
    }
    random_run, lbgr_run = runs["random"], runs["lbgr"]
    assert random_run.prompt_tokens == lbgr_run.prompt_tokens
    assert random_run.hit_rate is not None
    assert lbgr_run.hit_rate is not None
    assert random_run.latency is not None
    assert lbgr_run.latency is not None
    assert lbgr_run.hit_rate > 1.3 * random_run.hit_rate
    assert lbgr_run.latency.p50 < random_run.latency.p50 / 2
