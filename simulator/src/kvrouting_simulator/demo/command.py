"""`kvrouting demo`: the whole path on this machine, two set-ups compared, a report to open."""

from __future__ import annotations

import asyncio
import signal
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import click
from rich.console import Console

from kvrouting_simulator.demo.cluster import PoolNotLiveError
from kvrouting_simulator.demo.introduction import introduction
from kvrouting_simulator.demo.ports import NoFreePortsError
from kvrouting_simulator.demo.processes import ProcessFailedError
from kvrouting_simulator.demo.real_run import run_setup
from kvrouting_simulator.demo.scenario import DemoScenario, sglang_scenario
from kvrouting_simulator.demo.sglang_engines import NoSglangError, SglangEngines, write_model
from kvrouting_simulator.demo.virtual_run import virtual_setups
from kvrouting_simulator.report import Report, Run, save_report
from kvrouting_simulator.report.table import agreement_table, comparison_table, require_answers, trouble_lines

_INTERRUPTED = 130  # as shells report an interrupt
_EXPECTED_ERRORS = (ProcessFailedError, PoolNotLiveError, NoFreePortsError, NoSglangError)


@click.command()
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("out/demo"),
    show_default=True,
    help="Folder for the report and the logs.",
)
@click.option("--requests", type=click.IntRange(min=1), help="Of each half.  [default: 540; sglang: 180]")
@click.option("--seed", type=int, default=1, show_default=True, help="Of the requests, their arrivals and evictions.")
@click.option(
    "--virtual/--no-virtual", default=None, help="Also simulate both halves.  [default: yes; sglang: not possible]"
)
@click.option(
    "--engine",
    type=click.Choice(["simulated", "sglang"]),
    default="simulated",
    show_default=True,
    help="Simulated engines, or two real servers on the CPU with a tiny model.",
)
@click.option(
    "--engine-python",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="With sglang: the Python in whose environment SGLang and the plug-in are installed.",
)
def demo(
    out: Path, requests: int | None, seed: int, engine: str, engine_python: Path | None, *, virtual: bool | None
) -> None:
    """Run engines, their sidecars and the router, all as processes, and compare two set-ups.

    The same requests go through the HTTP API twice, first with cache-aware routing and LRU eviction, then with LBGR
    and rlt-adaptive. In each half one engine is killed and comes back. Takes three minutes with four simulated
    engines, five with two real ones, and ends everything it started, however it ends.
    """
    sglang = engine == "sglang"
    if sglang and virtual:
        raise click.UsageError(
            "--virtual needs --engine simulated: the virtual clock does not know this machine's times"
        )
    if sglang is not (engine_python is not None):
        raise click.UsageError("--engine sglang and --engine-python belong together: give both or none")
    console, start_s = Console(), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kvrouting-model-") as folder:
        try:
            scenario = _scenario(engine_python, Path(folder), seed=seed, requests=requests)
            runs = asyncio.run(_real_runs(scenario, out, console))
            report = _report(scenario, runs, console, virtual=not sglang if virtual is None else virtual)
        except _EXPECTED_ERRORS as error:
            raise click.ClickException(str(error)) from error
        except (KeyboardInterrupt, asyncio.CancelledError):
            console.print("interrupted; all processes have ended")
            raise SystemExit(_INTERRUPTED) from None
    _show(report, out, console)
    console.print(f"took {time.monotonic() - start_s:.0f} s; all processes have ended", highlight=False)
    require_answers(report)


def _scenario(engine_python: Path | None, model_folder: Path, *, seed: int, requests: int | None) -> DemoScenario:
    """The engines are real ones if a Python that has them is given."""
    if engine_python is None:
        scenario = DemoScenario(seed=seed)
    else:
        # Its own path, not what a link leads to: by that a Python finds its environment.
        engines = SglangEngines.found(engine_python.absolute(), model_folder=write_model(model_folder))
        scenario = sglang_scenario(engines, seed=seed)
    if requests is None:
        return scenario
    return replace(scenario, gsp=replace(scenario.gsp, requests=requests))


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
        introduction=introduction(scenario, virtual=virtual),
        runs=(*real, *reference, *twins),
        pairs=tuple((run.name, twin.name) for run, twin in zip(real, twins, strict=virtual)),
    )


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
