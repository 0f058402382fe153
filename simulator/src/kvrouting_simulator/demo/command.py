"""`kvrouting demo`: the whole path on this machine, two set-ups compared, a report to open."""

from __future__ import annotations

import asyncio
import signal
import time
from dataclasses import replace
from pathlib import Path

import click
from rich.console import Console

from kvrouting_simulator.demo.cluster import PoolNotLiveError
from kvrouting_simulator.demo.ports import NoFreePortsError
from kvrouting_simulator.demo.processes import ProcessFailedError
from kvrouting_simulator.demo.real_run import run_setup
from kvrouting_simulator.demo.scenario import DemoScenario
from kvrouting_simulator.demo.virtual_run import virtual_setups
from kvrouting_simulator.report import Report, Run, save_report
from kvrouting_simulator.report.table import agreement_table, comparison_table, require_answers, trouble_lines

_INTERRUPTED = 130  # as shells report an interrupt
_EXPECTED_ERRORS = (ProcessFailedError, PoolNotLiveError, NoFreePortsError)


@click.command()
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("out/demo"),
    show_default=True,
    help="Folder for the report and the logs.",
)
@click.option("--requests", type=click.IntRange(min=1), help="Of each half.  [default: 540]")
@click.option("--seed", type=int, default=1, show_default=True, help="Of the requests, their arrivals and evictions.")
@click.option("--virtual/--no-virtual", default=True, show_default=True, help="Also simulate both halves.")
def demo(out: Path, requests: int | None, seed: int, *, virtual: bool) -> None:
    """Run four simulated engines, their sidecars and the router, all as processes, and compare two set-ups.

    The same requests go through the HTTP API twice, first with cache-aware routing and LRU eviction, then with LBGR
    and RLT. In each half one engine is killed and comes back. Takes about three minutes and ends everything it
    started, however it ends.
    """
    scenario = DemoScenario(seed=seed)
    if requests is not None:
        scenario = replace(scenario, gsp=replace(scenario.gsp, requests=requests))
    console = Console()
    start_s = time.monotonic()
    try:
        runs = asyncio.run(_real_runs(scenario, out, console))
        report = _report(scenario, runs, console, virtual=virtual)
    except _EXPECTED_ERRORS as error:
        raise click.ClickException(str(error)) from error
    except (KeyboardInterrupt, asyncio.CancelledError):
        console.print("interrupted; all processes have ended")
        raise SystemExit(_INTERRUPTED) from None
    _show(report, out, console)
    console.print(f"took {time.monotonic() - start_s:.0f} s; all processes have ended", highlight=False)
    require_answers(report)


async def _real_runs(scenario: DemoScenario, out: Path, console: Console) -> list[Run]:
    main = asyncio.current_task()
    assert main is not None  # noqa: S101 - a coroutine runs in a task
    # An interrupt cancels the main task by itself; being asked to end must do the same.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, main.cancel)
    return [
        await run_setup(scenario, setup, folder=out / "logs" / setup.folder_name, console=console)
        for setup in scenario.setups
    ]


def _report(scenario: DemoScenario, real: list[Run], console: Console, *, virtual: bool) -> Report:
    twins: list[Run] = []
    reference: list[Run] = []
    if virtual:
        console.print("simulating on the virtual clock")
        setups = (*scenario.setups, scenario.reference)
        *twins, last = virtual_setups(scenario, setups, (*real, real[0]))
        reference = [last]
    return Report(
        title="kvrouting demo",
        introduction=_introduction(scenario, virtual=virtual),
        runs=(*real, *reference, *twins),
        pairs=tuple((run.name, twin.name) for run, twin in zip(real, twins, strict=virtual)),
    )


def _introduction(scenario: DemoScenario, *, virtual: bool) -> tuple[str, ...]:
    lines = [
        (
            f"{scenario.engines} simulated {scenario.worker_class} engines with KV caches of "
            f"{scenario.capacity_tokens:,} tokens, a sidecar each, and one router ran as processes of their own on "
            "this machine. The same requests at the same times went through the router's HTTP API as streams, once "
            "for each set-up; all processes were new in each half."
        ),
        (
            "The requests are GSP, prompts that share their first half within a group, at half its size: half the "
            "groups on caches of half the tokens, so that shared prefixes stand to caches as in the whole benchmark."
        ),
        (
            "In each half one engine is killed with signal 9 while it has requests, and started again with an empty "
            "cache. A request whose answer had not begun goes to another worker inside the router. One whose answer "
            "was cut is sent again by the client, once; it is counted in the table and its latency counts from its "
            "first arrival."
        ),
    ]
    if virtual:
        lines.append(
            f"{scenario.setups[0].policy} follows a prefix that is more than half of the prompt, and here none is: GSP "
            "shares exactly half. So it only keeps the caches equally full. The last column shows, simulated, what it "
            "does with a threshold below half."
        )
        lines.append(
            "Agreement: the same scenario with the same arrivals and the failure as it happened, run by the same "
            "engine model, index and policies on a virtual clock, without processes."
        )
    return tuple(lines)


def _show(report: Report, out: Path, console: Console) -> None:
    # Imported here: plots are slow to import, and nothing needs them before.
    from kvrouting_simulator.report.page import save_page

    save_report(report, out / "report.json")
    save_page(report, out / "report.html")
    console.print(comparison_table(report))
    agreement = agreement_table(report)
    if agreement is not None:
        console.print(agreement)
    for line in trouble_lines(report):
        console.print(line, markup=False, highlight=False)
    console.print(f"open {out / 'report.html'} (figures: {out / 'report.json'}, logs: {out / 'logs'})", markup=False)
