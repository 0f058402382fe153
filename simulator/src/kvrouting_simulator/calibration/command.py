"""`kvrouting calibrate`: from a router's recorded decisions to a worker class that router and engine take."""

from __future__ import annotations

import datetime as dt
import fnmatch
from dataclasses import asdict, replace
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from kvrouting_core.class_file import COEFFICIENTS, ClassFileError, MeasuredClass
from kvrouting_core.service_time import WORKER_CLASSES, StepTimes
from kvrouting_simulator.calibration.class_fit import (
    Calibration,
    CalibrationError,
    calibrate,
    decode_error,
    prefill_error,
)
from kvrouting_simulator.calibration.observations import DecisionsError, Observation, read_decisions

_CHECKED_SHARE = 0.3
# A coefficient whose standard error is a larger part of it is hardly more than a guess.
_VAGUE = 0.25


@click.command("calibrate")
@click.argument("decisions", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--name", required=True, help="Of the class, as the sidecars' --gpu-class or the pool's gpu.prior says.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="The class file.  [default: NAME.json]")
@click.option("--worker", "patterns", multiple=True, help="Only these workers, e.g. 'w1/*'; may be repeated.")
@click.option(
    "--compare",
    type=click.Choice(list(WORKER_CLASSES)),
    default="L40",
    show_default=True,
    help="Class whose errors are shown beside; an unknown class is taken for L40.",
)
@click.option("--seed", type=int, default=1, show_default=True, help="Of the bootstrap.")
def calibrate_command(
    decisions: tuple[Path, ...], name: str, out: Path | None, patterns: tuple[str, ...], compare: str, seed: int
) -> None:
    """Fit a worker class (a, b, d0, d1, d2) to the DECISIONS that a router recorded with --decisions-file.

    All workers of the files must be of one kind, or be chosen by --worker. Prints the coefficients with their
    standard errors, and how well they predict the last third, fitted to the rest.
    """
    try:
        named = MeasuredClass(name=name, times=WORKER_CLASSES[compare].times)
        observations = _observations(decisions, patterns)
        found = calibrate(observations, seed=seed)
        blind = calibrate(_early(observations), seed=seed)
    except (DecisionsError, CalibrationError, ClassFileError) as error:
        raise click.ClickException(str(error)) from error
    measured = replace(
        named, times=found.times, standard_errors=found.standard_errors, measured=_measured(observations, found)
    )
    path = out or Path(f"{name}.json")
    try:
        path.write_text(measured.as_text(), encoding="utf-8")
    except OSError as error:
        raise click.ClickException(f"{path} cannot be written: {error}") from error
    console = Console()
    console.print(_coefficients(found))
    console.print(_errors(found, blind, compare))
    for line in _vague(found):
        console.print(line, markup=False, highlight=False)
    console.print(f"wrote {path}: kvrouting router --class-file {path}", markup=False, highlight=False)


def _observations(paths: tuple[Path, ...], patterns: tuple[str, ...]) -> list[Observation]:
    """The clocks of several files differ: each file's workers are its own."""
    found: list[Observation] = []
    for number, path in enumerate(paths):
        with path.open(encoding="utf-8") as lines:
            found += [
                replace(each, worker=f"{number}:{each.worker}")
                for each in read_decisions(lines, name=str(path))
                if not patterns or any(fnmatch.fnmatchcase(each.worker, pattern) for pattern in patterns)
            ]
    if not found:
        raise DecisionsError(f"{', '.join(map(str, paths))}: no request{' of these workers' if patterns else ''}")
    return found


def _early(observations: list[Observation]) -> list[Observation]:
    """All but the last third of each worker's."""
    by_worker: dict[str, list[Observation]] = {}
    for each in sorted(observations, key=lambda o: o.dispatched_ms):
        by_worker.setdefault(each.worker, []).append(each)
    return [each for own in by_worker.values() for each in own[: round(len(own) * (1 - _CHECKED_SHARE))]]


def _measured(observations: list[Observation], found: Calibration) -> dict[str, object]:
    return {
        "requests": len(observations),
        "prefill_batches": len(found.batches),
        "answers": len(found.intervals),
        "date": dt.datetime.now(dt.timezone.utc).date().isoformat(),
        "note": "as a router sees it: prefill_overhead_ms holds the way to the engine and back",
    }


def _coefficients(found: Calibration) -> Table:
    table = Table("coefficient", "value", "standard error", "of it")
    for name in COEFFICIENTS:
        value, error = getattr(found.times, name), found.standard_errors.get(name)
        share = f"{error / value:.1%}" if error is not None and value else ""
        table.add_row(name, f"{value:.4g}", "" if error is None else f"{error:.2g}", share)
    return table


def _errors(found: Calibration, blind: Calibration, compare: str) -> Table:
    """Of the last rows, by times that did not see them."""
    batches = found.batches[round(len(found.batches) * (1 - _CHECKED_SHARE)) :]
    intervals = found.intervals[round(len(found.intervals) * (1 - _CHECKED_SHARE)) :]
    table = Table("error of", f"class {compare}", "bias", "fitted", "bias")
    before = WORKER_CLASSES[compare].times
    rows = {
        "prefill batch": [prefill_error(times, batches) for times in (before, blind.times)],
        "decode step": [decode_error(times, intervals) for times in (before, blind.times)],
    }
    for what, (old, new) in rows.items():
        table.add_row(what, f"{old.median:.1%}", f"{old.bias:+.1%}", f"{new.median:.1%}", f"{new.bias:+.1%}")
    return table


def _vague(found: Calibration) -> list[str]:
    values: dict[str, float] = asdict(found.times)
    return [
        f"{name} is uncertain: {_what_helps(found.times, name)}"
        for name, error in found.standard_errors.items()
        if error > _VAGUE * values[name]
    ]


def _what_helps(times: StepTimes, name: str) -> str:
    if name == "prefill_overhead_ms":
        return "it matters little; more requests that come alone would tell"
    if name.startswith("decode"):
        return "answers of more tokens, in batches and contexts of more different sizes, would tell"
    return f"prompts of more different lengths would tell (now {times.prefill_ms_per_token:.3g} ms a token)"
