"""`kvrouting bench`: drive an endpoint with a workload, report, and compare reports."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from kvrouting_simulator.loadgen.apis import API_NAMES, Api, build_api
from kvrouting_simulator.loadgen.drive import Target, drive, lateness_notes
from kvrouting_simulator.loadgen.generator import Limits, LoadGenerator
from kvrouting_simulator.loadgen.http_sender import FlushFailedError
from kvrouting_simulator.loadgen.progress import ProgressView, progress_view
from kvrouting_simulator.loadgen.workload_choice import Traffic, build_client, build_spec, described
from kvrouting_simulator.option_types import EXISTING_FILE, FILE, POSITIVE, headers, named_values
from kvrouting_simulator.report import Report, RequestRecord, Run, join_reports, load_report, save_report, summarise
from kvrouting_simulator.report.document import ReportUnreadableError
from kvrouting_simulator.report.table import comparison_table, require_answers, trouble_lines
from kvrouting_simulator.workloads import WORKLOAD_NAMES, Client
from kvrouting_tokenization import load_tokenizer


class InterruptedRunError(click.ClickException):
    """The run was stopped before anything was sent."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outputs:
    """Where the report goes. goodput_ttft_ms: target for the time to first token; None: no goodput."""

    name: str
    out: Path | None
    html: Path | None
    goodput_ttft_ms: float | None


@click.group(invoke_without_command=True)
@click.option("--url", help="Endpoint, for example http://127.0.0.1:8080.")
@click.option("--api", type=click.Choice(API_NAMES), default="generate", show_default=True, help="Request shape.")
@click.option("--workload", type=click.Choice(WORKLOAD_NAMES), help="What is asked.  [default: gsp]")
@click.option("--trace", type=EXISTING_FILE, help="The trace's file; its kind is seen unless --workload says it.")
@click.option(
    "--set",
    "settings",
    multiple=True,
    callback=named_values,
    metavar="NAME=VALUE",
    help="A number of the workload, for example groups=64; lists with commas. Repeatable.",
)
@click.option("--rate", type=POSITIVE, help="Requests/s, Poisson.  [default: 12; a trace: its own times]")
@click.option("--speed", type=POSITIVE, help="A trace's times run so much faster.")
@click.option("--requests", type=click.IntRange(min=1), help="Send at most so many.")
@click.option("--duration", type=POSITIVE, help="Send nothing that is due after so many seconds.")
@click.option("--seed", type=int, default=1, show_default=True, help="Of order and arrivals.")
@click.option("--timeout", type=POSITIVE, default=600.0, show_default=True, help="Seconds for one request.")
@click.option("--max-connections", type=click.IntRange(min=1), help="At once; others wait.  [default: no limit]")
@click.option("--flush", "flush_urls", multiple=True, metavar="URL", help="Engine to flush just before. Repeatable.")
@click.option("--model", default="default", show_default=True, help="Model name of the OpenAI APIs.")
@click.option("--tokenizer", help="Folder, hub name or 'bytes'; for --api chat, which sends text.")
@click.option(
    "--header", "headers", multiple=True, callback=headers, metavar="'NAME: VALUE'", help="Sent along. Repeatable."
)
@click.option("--name", default=None, help="Name of the run in reports.  [default: URL and workload]")
@click.option("--out", type=FILE, help="Save records and figures as JSON.")
@click.option("--html", type=FILE, help="Save a page with figures and plots.")
@click.option("--goodput-ttft", type=POSITIVE, help="Target in ms: count requests/s that meet it.")
@click.pass_context
def bench(context: click.Context, /, **given: Any) -> None:
    """Drive an OpenAI or SGLang endpoint: each request at its time, whatever became of the others.

    Nothing is retried; every failure is counted with its error. An interrupt ends the run and reports what was done.
    The exit code is 1 if no request was answered.
    """
    if context.invoked_subcommand is not None:
        return
    if given["url"] is None:
        raise click.UsageError("give --url, for example --url http://127.0.0.1:8080")
    try:
        traffic, target = _traffic(given), _target(given)
        outputs = Outputs(
            name=given["name"] or f"{target.url} {traffic.name}",
            out=given["out"],
            html=given["html"],
            goodput_ttft_ms=given["goodput_ttft"],
        )
        _run(target, traffic, Limits(duration_s=given["duration"]), outputs)
    except (ValueError, OSError, FlushFailedError) as error:
        raise click.ClickException(str(error)) from error


def _traffic(given: Mapping[str, Any]) -> Traffic:
    return Traffic(
        workload=given["workload"],
        trace=given["trace"],
        settings=given["settings"],
        rate_per_s=given["rate"],
        speed=given["speed"],
        requests=given["requests"],
        seed=given["seed"],
    )


def _target(given: Mapping[str, Any]) -> Target:
    return Target(
        url=given["url"],
        api=_api(given["api"], given["model"], given["tokenizer"]),
        timeout_s=given["timeout"],
        max_connections=given["max_connections"],
        headers=given["headers"],
        flush_urls=given["flush_urls"],
    )


def _api(name: str, model: str, tokenizer: str | None) -> Api:
    decode = load_tokenizer(tokenizer).decode if tokenizer is not None else None
    if name == "chat" and decode is None:
        raise click.UsageError("--api chat sends text: give the model's tokenizer with --tokenizer")
    return build_api(name, model=model, decode=decode)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop where it is installed: a faster generator is late less often."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def _run(target: Target, traffic: Traffic, limits: Limits, outputs: Outputs) -> None:
    console = Console()
    spec = build_spec(traffic)
    client, planned = build_client(spec, seed=traffic.seed)
    with (
        progress_view(console, traffic.name, total=planned, monotonic_s=time.monotonic) as progress,
        asyncio.Runner(loop_factory=_loop_factory()) as runner,
    ):
        records = runner.run(_drive_interruptibly(target, client, limits, progress))
    if not records:
        raise InterruptedRunError("stopped before anything was sent: there is nothing to report")
    summary = summarise(records, goodput_ttft_ms=outputs.goodput_ttft_ms)
    run = Run(
        name=outputs.name,
        parameters={
            "url": target.url,
            "path": target.api.path,
            **described(spec, seed=traffic.seed),
            "duration (s)": limits.duration_s,
            "time limit of a request (s)": target.timeout_s,
            "connections at most": target.max_connections,
            "flushed before": bool(target.flush_urls),
        },
        records=records,
        summary=summary,
        notes=lateness_notes(summary, max_connections=target.max_connections),
    )
    report = Report(title="kvrouting bench", runs=(run,))
    _report(report, outputs, console)
    require_answers(report)


async def _drive_interruptibly(
    target: Target, client: Client, limits: Limits, progress: ProgressView
) -> tuple[RequestRecord, ...]:
    loop = asyncio.get_running_loop()

    def stop_on_interrupt(generator: LoadGenerator) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, generator.stop)

    return await drive(target, client, limits=limits, progress=progress, on_start=stop_on_interrupt)


def _report(report: Report, outputs: Outputs, console: Console) -> None:
    console.print(comparison_table(report))
    for line in trouble_lines(report):
        console.print(line, markup=False, highlight=False)
    if outputs.out is not None:
        save_report(report, outputs.out)
    if outputs.html is not None:
        # Imported here: plots are slow to import and not every run draws any.
        from kvrouting_simulator.report.page import save_page

        save_page(report, outputs.html)
    for path in filter(None, (outputs.out, outputs.html)):
        console.print(f"saved {path}", markup=False, highlight=False)


@bench.command()
@click.argument("files", nargs=-1, required=True, type=EXISTING_FILE)
@click.option("--html", type=FILE, help="Save the comparison as a page.")
@click.option("--out", type=FILE, help="Save the joined runs as JSON.")
def compare(files: Sequence[Path], html: Path | None, out: Path | None) -> None:
    """Print saved reports side by side; ratios are against the first run of the first FILE."""
    try:
        reports = [load_report(path) for path in files]
    except ReportUnreadableError as error:
        raise click.ClickException(str(error)) from error
    joined = join_reports("kvrouting bench compare", reports, labels=[path.stem for path in files])
    _report(joined, Outputs(name="", out=out, html=html, goodput_ttft_ms=None), Console())
