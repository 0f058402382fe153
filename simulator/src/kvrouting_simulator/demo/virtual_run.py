"""The same scenario on the virtual clock: same requests, same arrivals, same failure."""

from __future__ import annotations

from dataclasses import replace

from kvrouting_simulator.demo.scenario import RESUBMISSIONS, DemoScenario, Setup
from kvrouting_simulator.experiment.scenario import Delays, Failure, Scenario, WorkerSpec
from kvrouting_simulator.experiment.simulation import simulate
from kvrouting_simulator.report import Run, summarise


def virtual_setup(scenario: DemoScenario, setup: Setup, *, real: Run) -> Run:
    """Simulates a set-up with the failure as it happened in the real run.

    Raises: ValueError if the engines' clocks ran at another speed than the real one.
    """
    if scenario.speed != 1.0:
        raise ValueError(f"the virtual clock runs at the engines' speed, theirs was {scenario.speed:g}")
    simulated = Scenario(
        workload=scenario.gsp,
        workers=[
            WorkerSpec(
                worker_class=scenario.worker_class,
                capacity_tokens=scenario.capacity_tokens,
                eviction=setup.eviction,
                page_size=scenario.page_size,
            )
        ]
        * scenario.engines,
        policy=setup.policy,
        name=f"{setup.name} (virtual)",
        block_tokens=scenario.block_tokens,
        seed=scenario.seed,
        delays=Delays(report_on_change=True),
        failures=_failures(scenario, real),
        resubmissions=RESUBMISSIONS,
        goodput_ttft_ms=scenario.goodput_ttft_ms,
        settings=scenario.described(setup),
    )
    run = simulate(simulated)
    # Imbalance as the real run has it: of prefilled tokens, a killed engine's busy time is not known.
    summary = summarise(
        run.records,
        goodput_ttft_ms=scenario.goodput_ttft_ms,
        workers=[load.worker for load in run.summary.workers],
    )
    return replace(run, summary=summary)


def _failures(scenario: DemoScenario, real: Run) -> tuple[Failure, ...]:
    moments = {mark.kind: mark.at_ms for mark in real.marks}
    if "killed" not in moments:
        return ()
    return (Failure(worker=scenario.hurt.worker, killed_ms=moments["killed"], back_ms=moments.get("returned")),)
