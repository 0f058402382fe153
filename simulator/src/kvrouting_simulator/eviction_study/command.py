"""`kvrouting evictions`: hit rates of all eviction policies on one cache."""

from __future__ import annotations

from pathlib import Path

import click

from kvrouting_simulator.eviction_study import pages
from kvrouting_simulator.eviction_study.loads import LOADS, Prompts
from kvrouting_simulator.eviction_study.outcomes import POLICY_TITLES, Case, OutcomeFile, cases, run_case


@click.command(
    context_settings={
        "auto_envvar_prefix": "KVROUTING_EVICTIONS",
        "help_option_names": ["-h", "--help"],
        "show_default": True,
    }
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("docs/results/eviction"),
    help="Folder for hit_rates.csv, table.md and hit_rates.png. Runs that the CSV file has are not run again.",
)
@click.option("--load", "loads", multiple=True, type=click.Choice(list(LOADS)), help="Only this load; repeatable.")
@click.option("--policy", "policies", multiple=True, type=click.Choice(list(POLICY_TITLES)), help="Only this policy.")
@click.option("--seed", "seeds", multiple=True, type=int, default=(1, 2, 3), help="Of loads and policies; repeatable.")
@click.option("--page-size", type=click.IntRange(1, 64), default=64, help="Tokens per page of the cache.")
@click.option("--capacity", "capacities", multiple=True, type=int, help="Only this capacity of the loads; repeatable.")
@click.option(
    "--traces",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("traces"),
    help="Folder with the published traces; a load whose trace is not there is left out.",
)
def evictions(
    *,
    out: Path,
    loads: tuple[str, ...],
    policies: tuple[str, ...],
    seeds: tuple[int, ...],
    page_size: int,
    capacities: tuple[int, ...],
    traces: Path,
) -> None:
    """Serve sequences of prompts one by one from a single cache, once with each eviction policy, and compare."""
    file = OutcomeFile(out / "hit_rates.csv")
    planned = [
        case
        for case in cases(_at_hand(loads or tuple(LOADS), traces), policies or tuple(POLICY_TITLES), seeds, page_size)
        if case not in file.outcomes and (not capacities or case.capacity_tokens in capacities)
    ]
    _run(planned, file, traces)
    outcomes = list(file.outcomes.values())
    out.mkdir(parents=True, exist_ok=True)
    text = pages.table(outcomes)
    narrow = pages.blocks(outcomes)
    (out / "table.md").write_text(text + ("\n" + narrow if narrow else ""), encoding="utf-8")
    (out / "hit_rates.png").write_bytes(pages.plot(outcomes))
    click.echo(text)
    click.echo(narrow)


def _at_hand(loads: tuple[str, ...], traces: Path) -> list[str]:
    found = []
    for name in loads:
        trace = LOADS[name].trace
        if trace is None or (traces / trace).exists():
            found.append(name)
        else:
            click.echo(f"{name}: left out, {traces / trace} is not there: give its folder with --traces", err=True)
    return found


def _run(planned: list[Case], file: OutcomeFile, traces: Path) -> None:
    prompts: Prompts = ()
    made_for: tuple[str, int] | None = None
    for case in planned:
        if made_for != (case.load, case.seed):
            prompts = LOADS[case.load].prompts(case.seed, traces)
            made_for = (case.load, case.seed)
        outcome = run_case(case, prompts)
        file.add(outcome)
        click.echo(
            f"{case.load} {case.capacity_tokens} {case.policy} seed {case.seed}: {outcome.hit_rate:.4f}", err=True
        )
