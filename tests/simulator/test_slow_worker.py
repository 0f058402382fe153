"""A worker that becomes slow loses its share of the requests within seconds, on the virtual clock."""

from __future__ import annotations

from dataclasses import replace

from kvrouting_simulator.experiment import simulate
from kvrouting_simulator.experiment.scenario import Scenario, WorkerSpec
from kvrouting_simulator.report import RequestRecord
from kvrouting_simulator.workloads.arrivals import PoissonArrivals
from kvrouting_simulator.workloads.gsp import Gsp

SLOW_FROM_MS = 60_000.0
WORKER = WorkerSpec(page_size=64)
SLOW = replace(WORKER, slow_from_ms=SLOW_FROM_MS, slow_factor=3.0)


def run(seed: int) -> list[RequestRecord]:
    workload = Gsp(arrivals=PoissonArrivals(rate_per_s=10.0), requests=900)
    scenario = Scenario(
        name="slow", workload=workload, workers=[WORKER, WORKER, WORKER, SLOW], policy="lbgr", seed=seed
    )
    return list(simulate(scenario).records)


def share(records: list[RequestRecord], begin_ms: float, end_ms: float) -> float:
    arrived = [record for record in records if begin_ms <= record.arrival_ms < end_ms]
    return sum(record.worker == "w3/0" for record in arrived) / len(arrived)


def test_the_share_of_a_worker_that_slows_to_a_third_halves_within_five_seconds() -> None:
    records = [record for seed in (1, 2, 3, 4) for record in run(seed)]
    before = share(records, SLOW_FROM_MS / 2, SLOW_FROM_MS)
    assert 0.15 < before < 0.35
    assert share(records, SLOW_FROM_MS + 5_000, SLOW_FROM_MS + 10_000) <= before / 2
    assert share(records, SLOW_FROM_MS + 10_000, SLOW_FROM_MS + 30_000) <= before / 2
