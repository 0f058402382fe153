"""Runs one cell, here and now. Pure but for the files of the workload and the clock of timed cells."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvrouting_core.prefix_index import PrefixIndex
from kvrouting_simulator.experiment import build_scenario, simulate
from kvrouting_simulator.experiment.simulation import Simulation, policy_of, run_of
from kvrouting_simulator.experiment.worker import EngineParts
from kvrouting_simulator.study.cell import CapacitySearch, Cell, CellResult
from kvrouting_simulator.study.figures import of_summary
from kvrouting_simulator.study.hindsight import simulate_with_hindsight
from kvrouting_simulator.study.paths import changed
from kvrouting_simulator.study.stopwatch import Seconds, Stopwatch, TimedPolicy, timed_cache

DATA = "data:"


def run_cell(cell: Cell, *, data: Path, seconds: Seconds = time.process_time) -> CellResult:
    """The result. data: folder of trace files. seconds: clock of timed cells.

    Raises: ValueError if the scenario is wrong or cannot be run as its kind says; OSError for an unreadable file.
    """
    values = with_data(cell.scenario, data)
    if cell.capacity is not None:
        return CellResult(digest=cell.digest, figures=_capacity(values, cell.capacity))
    if cell.kind == "timed":
        return _timed(cell, values, seconds)
    scenario = build_scenario(values)
    run = simulate_with_hindsight(scenario) if cell.kind == "optimum" else simulate(scenario)
    return CellResult(digest=cell.digest, figures=of_summary(run.summary))


def with_data(scenario: Mapping[str, Any], data: Path) -> dict[str, Any]:
    """The values with the real path of the workload's file."""
    path = scenario.get("workload", {}).get("path", "")
    if not str(path).startswith(DATA):
        return dict(scenario)
    return changed(scenario, {"workload.path": str(data / str(path).removeprefix(DATA))})


def data_file(scenario: Mapping[str, Any]) -> str | None:
    """The name of the trace file that a scenario needs; None if it needs none."""
    path = str(scenario.get("workload", {}).get("path", ""))
    return path.removeprefix(DATA) if path.startswith(DATA) else None


def _timed(cell: Cell, values: Mapping[str, Any], seconds: Seconds) -> CellResult:
    scenario = build_scenario(values)
    index = PrefixIndex()
    decisions, evictions = Stopwatch(seconds), Stopwatch(seconds)
    policy = TimedPolicy(policy_of(scenario, index), decisions)
    parts = EngineParts(cache=timed_cache(evictions))
    summary = run_of(scenario, Simulation(scenario, policy=policy, index=index, parts=parts).run()).summary
    measured = {
        "decision_us": decisions.total_s * 1e6 / summary.requests,
        "eviction_us": evictions.total_s * 1e6 / summary.requests,
    }
    return CellResult(digest=cell.digest, figures=of_summary(summary), measured=measured)


def _capacity(values: Mapping[str, Any], search: CapacitySearch) -> dict[str, float | None]:
    """Bisection, as if more load were never faster. None: not even the lowest rate meets the target."""
    low, high = -1, round((search.high_per_s - search.low_per_s) / search.step_per_s) + 1
    found: dict[str, float | None] = {"capacity_per_s": None}
    while high - low > 1:
        middle = (low + high) // 2
        rate = search.low_per_s + middle * search.step_per_s
        run = simulate(build_scenario(changed(values, {"workload.arrivals.rate_per_s": rate})))
        figures = of_summary(run.summary)
        p95 = figures["latency_p95_s"]
        if p95 is not None and p95 <= search.target_p95_s and run.summary.completed == run.summary.requests:
            low, found = middle, {**figures, "capacity_per_s": rate}
        else:
            high = middle
    return found
