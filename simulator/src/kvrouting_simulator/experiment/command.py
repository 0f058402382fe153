"""`kvrouting simulate`: scenarios from files or options, their figures side by side."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from kvrouting_core.eviction import DEFAULT_POLICY, POLICIES
from kvrouting_core.routing.registry import POLICY_NAMES
from kvrouting_core.service_time import WORKER_CLASSES
from kvrouting_simulator.experiment.scenario_file import ScenarioError, build_scenario, read_values
from kvrouting_simulator.experiment.simulation import simulate as simulate_scenario
from kvrouting_simulator.option_types import EXISTING_FILE, FILE, POSITIVE, named_values
from kvrouting_simulator.report import Report, Run, save_report
from kvrouting_simulator.report.table import comparison_table, require_answers, trouble_lines
from kvrouting_simulator.workloads.catalogue import WORKLOAD_NAMES, takes, trace_kind

_WORKLOAD_OPTIONS = ("order", "requests", "speed")
_WORKER_OPTIONS = ("worker_class", "capacity_tokens", "eviction", "page_size")
_SCHEDULER_OPTIONS = ("max_running_requests", "prefill_decode_interval", "mixed_chunk")


@click.command(context_settings={"show_default": True})
@click.argument("scenarios", nargs=-1, type=EXISTING_FILE)
@click.option("--workload", type=click.Choice(WORKLOAD_NAMES), help="What is asked.  [default: gsp]")
@click.option("--trace", type=EXISTING_FILE, help="The trace's file; its kind is seen unless --workload says it.")
@click.option("--order", help="Of GSP and long documents: random, round_robin, grouped.")
@click.option("--rate", type=POSITIVE, help="Requests/s, Poisson.  [default: 12]")
@click.option("--cv", type=POSITIVE, help="Coefficient of variation of the gaps: bursts above 1.")
@click.option("--requests", type=click.IntRange(min=1), help="Only the first so many.")
@click.option("--speed", type=POSITIVE, help="A trace runs so much faster.")
@click.option("--set", "settings", multiple=True, callback=named_values, metavar="NAME=VALUE", help="Of the workload.")
@click.option("--policy", "policies", type=click.Choice(POLICY_NAMES), multiple=True, help="Repeat to compare.")
@click.option("--parameter", multiple=True, callback=named_values, metavar="NAME=VALUE", help="Of the policy.")
@click.option("--routers", type=click.IntRange(min=1), help="How many share the requests.  [default: 1]")
@click.option("--workers", type=click.IntRange(min=1), help="How many.  [default: 4]")
@click.option("--worker-class", type=click.Choice(list(WORKER_CLASSES)), help="[default: L40]")
@click.option("--capacity-tokens", type=click.IntRange(min=1), help="[default: of the worker class]")
@click.option("--eviction", type=click.Choice(list(POLICIES)), help=f"[default: {DEFAULT_POLICY}]")
@click.option("--page-size", type=click.IntRange(1, 64), help="[default: 1]")
@click.option("--max-running-requests", type=click.IntRange(min=1), help="[default: 2048]")
@click.option("--prefill-decode-interval", type=click.IntRange(min=0), help="[default: 0]")
@click.option("--mixed-chunk/--no-mixed-chunk", default=None, help="[default: no]")
@click.option("--seed", type=click.IntRange(min=0), help="Of order, arrivals, evictions and ties.  [default: 1]")
@click.option("--goodput-ttft", type=POSITIVE, help="Target in ms: count requests/s that meet it.")
@click.option("--out", type=FILE, help="Save records and figures as JSON.")
@click.option("--html", type=FILE, help="Save a page with figures and plots.")
def simulate(
    *,
    scenarios: Sequence[Path],
    policies: Sequence[str],
    parameter: Mapping[str, str],
    out: Path | None,
    html: Path | None,
    **options: Any,
) -> None:
    """Run policies and engines on a virtual clock, as SCENARIOS (.toml, .json) or the options say.

    Options change every scenario that is given. The same scenario and seed give the same bytes.
    """
    try:
        bases = [read_values(path) for path in scenarios] or [{}]
        changed = [_changed(base, options, parameter) for base in bases]
        chosen: Sequence[dict[str, Any]] = [{"policy": policy} for policy in policies] or [{}]
        runs = [simulate_scenario(build_scenario({**values, **choice})) for values in changed for choice in chosen]
    except (ValueError, OSError) as error:
        raise click.ClickException(str(error)) from error
    report = Report(title="Simulation", runs=_named_apart(runs))
    console = Console()
    console.print(comparison_table(report))
    for line in trouble_lines(report):
        console.print(line, highlight=False)
    if out is not None:
        save_report(report, out)
    if html is not None:
        from kvrouting_simulator.report.page import save_page  # draws plots: slow to import

        save_page(report, html)
    require_answers(report)


def _changed(base: Mapping[str, Any], options: Mapping[str, Any], parameter: Mapping[str, str]) -> dict[str, Any]:
    """A scenario's values with the options that were given in their places."""
    given = {name: value for name, value in options.items() if value is not None}
    values = copy.deepcopy(dict(base))
    _change_workload(values, given)
    workers = values.setdefault("workers", [{"count": 4}])
    if not isinstance(workers, list) or not all(isinstance(worker, dict) for worker in workers):
        raise ScenarioError(f"workers must be a list of tables, got {workers!r}")
    if "workers" in given:
        values["workers"] = workers = [{**workers[0], "count": given["workers"]}]
    for worker in workers:
        worker.update({name: given[name] for name in _WORKER_OPTIONS if name in given})
        scheduler = {name: given[name] for name in _SCHEDULER_OPTIONS if name in given}
        if scheduler:
            worker["scheduler"] = {**worker.get("scheduler", {}), **scheduler}
    values.update({name: given[name] for name in ("seed", "routers") if name in given})
    if "goodput_ttft" in given:
        values["goodput_ttft_ms"] = given["goodput_ttft"]
    if parameter:
        values["policy_parameters"] = {**values.get("policy_parameters", {}), **parameter}
    return values


def _change_workload(values: dict[str, Any], given: Mapping[str, Any]) -> None:
    workload = values.setdefault("workload", {})
    if "trace" in given:
        workload["path"] = str(given["trace"])
        workload.setdefault("kind", trace_kind(given["trace"]))
    if "workload" in given:
        workload["kind"] = given["workload"]
    kind = workload.setdefault("kind", "gsp")
    workload.update({name: given[name] for name in _WORKLOAD_OPTIONS if name in given})
    workload.update(given["settings"])
    if "rate" in given or "cv" in given:
        if not takes(kind, "arrivals"):
            raise ScenarioError(f"workload {kind} has recorded times: it takes no --rate and no --cv, but --speed")
        arrivals = {"rate_per_s": given.get("rate", 12.0)}
        if "cv" in given:
            arrivals["cv"] = given["cv"]
        workload["arrivals"] = {"kind": "gamma" if "cv" in given else "poisson", **arrivals}


def _named_apart(runs: Sequence[Run]) -> tuple[Run, ...]:
    """The runs under different names."""
    taken: dict[str, int] = {}
    named = []
    for run in runs:
        taken[run.name] = taken.get(run.name, 0) + 1
        named.append(run if taken[run.name] == 1 else replace(run, name=f"{run.name} ({taken[run.name]})"))
    return tuple(named)
