"""Several routers before one pool, and workers that say they are something else."""

from __future__ import annotations

import pytest

from kvrouting_core.routing.events import Outcome
from kvrouting_simulator.experiment import Failure, Scenario, WorkerSpec, simulate
from kvrouting_simulator.report import Run
from kvrouting_simulator.workloads import Gsp, PoissonArrivals


def run(**more: object) -> Run:
    workload = Gsp(groups=8, prompts_per_group=16, lengths_tokens=(512, 2048), arrivals=PoissonArrivals(rate_per_s=20))
    values: dict[str, object] = {"workload": workload, "policy": "lbgr", **more}
    return simulate(Scenario(**{"workers": [WorkerSpec(capacity_tokens=8000, page_size=16)] * 3, **values}))  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", ["lbgr", "cache_aware"])
@pytest.mark.parametrize("failures", [(), (Failure(worker=0, killed_ms=2000, back_ms=4000),)])
def test_each_request_is_answered_once_whichever_router_has_it(policy: str, failures: tuple[Failure, ...]) -> None:
    records = run(routers=2, policy=policy, failures=failures, resubmissions=3).records
    assert len({record.request_id for record in records}) == len(records) == 128
    assert {record.outcome for record in records} == {Outcome.COMPLETED}


def test_routers_that_share_a_pool_use_all_of_it_and_repeat_themselves() -> None:
    first, second = run(routers=3), run(routers=3)
    assert first.records == second.records
    assert {record.worker for record in first.records} == {"w0/0", "w1/0", "w2/0"}


def test_no_router_is_refused() -> None:
    with pytest.raises(ValueError, match="routers"):
        run(routers=0)


def test_what_a_worker_says_of_itself_changes_decisions_and_not_its_speed() -> None:
    spec = {"capacity_tokens": 8000, "page_size": 16}
    told = run(policy="round_robin", workers=[WorkerSpec(told_class="H200", **spec)] * 2)  # type: ignore[arg-type]
    true = run(policy="round_robin", workers=[WorkerSpec(**spec)] * 2)  # type: ignore[arg-type]
    assert told.records == true.records
    with pytest.raises(ValueError, match="unknown worker class 'X'"):
        WorkerSpec(told_class="X")


def test_a_worker_may_say_that_its_prefill_takes_another_time_than_it_does() -> None:
    spec = {"capacity_tokens": 8000, "page_size": 16}
    told = run(policy="round_robin", workers=[WorkerSpec(told_prefill_factor=2, **spec)] * 2)  # type: ignore[arg-type]
    true = run(policy="round_robin", workers=[WorkerSpec(**spec)] * 2)  # type: ignore[arg-type]
    assert told.records == true.records
    misled = run(policy="lbgr", workers=[WorkerSpec(told_prefill_factor=2, **spec)] * 2)  # type: ignore[arg-type]
    right = run(policy="lbgr", workers=[WorkerSpec(**spec)] * 2)  # type: ignore[arg-type]
    assert misled.records != right.records
    with pytest.raises(ValueError, match="told_prefill_factor"):
        WorkerSpec(told_prefill_factor=0)
