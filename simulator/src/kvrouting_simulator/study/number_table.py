"""The numbers of a study as CSV: a line for each run. Pure: the same results give the same bytes."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

from kvrouting_simulator.study.cell import CellResult
from kvrouting_simulator.study.evidence import Evidence
from kvrouting_simulator.study.figures import FIGURES, MEASURED

_MORE_DECIMALS = 3  # than pages show: enough to see any change


def numbers_csv(evidence: Evidence) -> str:
    """Axes, seed, every figure that the simulation alone decides, and the digest of the cell."""
    names = [name for name in FIGURES if name not in MEASURED]
    return _csv(evidence, names, digest=True)


def measured_csv(evidence: Evidence) -> str | None:
    """The times that this machine took; None if the study measures none."""
    if not any(result.measured for _, result in evidence.rows()):
        return None
    return _csv(evidence, MEASURED, digest=False)


def _csv(evidence: Evidence, names: Sequence[str], *, digest: bool) -> str:
    rows = list(evidence.rows())
    shown = [name for name in names if any(_value(result, name) is not None for _, result in rows)]
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow([*(axis.name for axis in evidence.study.axes), "seed", *shown, *(["digest"] if digest else [])])
    for placed, result in rows:
        numbers = [_text(_value(result, name), FIGURES[name].decimals) for name in shown]
        writer.writerow([*evidence.place(placed.labels), placed.seed, *numbers, *([result.digest] if digest else [])])
    return buffer.getvalue()


def _value(result: CellResult, name: str) -> float | None:
    return result.measured.get(name) if name in MEASURED else result.figures.get(name)


def _text(value: float | None, decimals: int) -> str:
    return "" if value is None else f"{value:.{decimals + _MORE_DECIMALS if decimals else 0}f}"
