"""The same scenario on the virtual clock: same requests, same arrivals, same failure."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

from kvrouting_simulator.demo.scenario import RESUBMISSIONS, DemoScenario, Setup
from kvrouting_simulator.experiment.scenario import Delays, Failure, Scenario, WorkerSpec
from kvrouting_simulator.experiment.simulation import simulate
from kvrouting_simulator.report import Run, Summary, summarise

# Which worker a request gets can hang on a coin that decides a tie or on a fraction of a millisecond, and all that
# follows hangs on that; real processes have no two equal runs either. So a real run is compared with several simulated
# ones, of which this is the number. Number n has ties of its own and another delay from router to engine.
VARIANTS = 5


def _hop_ms(variant: int) -> float:
    return 1.0 + variant / 2


def virtual_setups(scenario: DemoScenario, setups: Sequence[Setup], real: Sequence[Run]) -> list[Run]:
    """For each set-up the middle one, by median latency, of several simulations; a note tells how far they spread.

    The failure is that of the real run, as it happened. Uses all cores.
    Raises: ValueError if the engines' clocks ran at another speed than the real one.
    """
    planned = [
        virtual_scenario(scenario, setup, real=run, variant=variant)
        for setup, run in zip(setups, real, strict=True)
        for variant in range(VARIANTS)
    ]
    workers = min(len(planned), os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        runs = list(pool.map(simulated, planned))
    return [middle(runs[first : first + VARIANTS]) for first in range(0, len(runs), VARIANTS)]


def virtual_scenario(scenario: DemoScenario, setup: Setup, *, real: Run, variant: int) -> Scenario:
    """One simulation of a set-up."""
    if scenario.speed != 1.0:
        raise ValueError(f"the virtual clock runs at the engines' speed, theirs was {scenario.speed:g}")
    worker = WorkerSpec(
        worker_class=scenario.worker_class,
        capacity_tokens=scenario.capacity_tokens,
        eviction=setup.eviction,
        page_size=scenario.page_size,
    )
    return Scenario(
        workload=scenario.gsp,
        workers=[worker] * scenario.engines,
        policy=setup.policy,
        policy_parameters=setup.parameters,
        name=f"{setup.name} (virtual)",
        block_tokens=scenario.block_tokens,
        seed=scenario.seed,
        tie_seed=scenario.seed + variant,
        delays=Delays(hop_ms=_hop_ms(variant), report_on_change=True),
        failures=_failures(scenario, real),
        resubmissions=RESUBMISSIONS,
        goodput_ttft_ms=scenario.goodput_ttft_ms,
        settings={**scenario.described(setup), "hop between router and engine (ms)": _hop_ms(variant)},
    )


def simulated(scenario: Scenario) -> Run:
    """The run, with its imbalance measured as in a real one: a killed engine takes its busy time with it."""
    run = simulate(scenario)
    summary = summarise(
        run.records,
        goodput_ttft_ms=scenario.goodput_ttft_ms,
        workers=[load.worker for load in run.summary.workers],
    )
    return replace(run, summary=summary)


def middle(runs: Sequence[Run]) -> Run:
    """The run with the median of the median latencies; its note gives the range of all."""
    ordered = sorted(runs, key=lambda run: run.summary.latency.p50 if run.summary.latency else 0.0)
    chosen = ordered[len(ordered) // 2]
    ranges = ", ".join(
        f"{name} {min(values):,.0f} to {max(values):,.0f} {unit}"
        for name, unit, figure in _SPREAD
        if (values := [v for run in runs if (v := figure(run.summary)) is not None])
    )
    note = f"the middle one of {len(runs)} simulations that differ in how ties fall and by half a millisecond of delay"
    return replace(chosen, notes=(*chosen.notes, f"{note}; they spread: {ranges}"))


_SPREAD: Sequence[tuple[str, str, Callable[[Summary], float | None]]] = (
    ("latency P50", "ms", lambda s: s.latency.p50 if s.latency else None),
    ("latency P95", "ms", lambda s: s.latency.p95 if s.latency else None),
    ("TTFT P50", "ms", lambda s: s.ttft.p50 if s.ttft else None),
    ("TTFT P95", "ms", lambda s: s.ttft.p95 if s.ttft else None),
)


def _failures(scenario: DemoScenario, real: Run) -> tuple[Failure, ...]:
    moments = {mark.kind: mark.at_ms for mark in real.marks}
    if "killed" not in moments:
        return ()
    return (Failure(worker=scenario.fault.worker, killed_ms=moments["killed"], back_ms=moments.get("returned")),)
