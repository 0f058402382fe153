"""The comparison in a terminal."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence

import click
from rich import box
from rich.table import Table

from kvrouting_simulator.report.document import Report
from kvrouting_simulator.report.rows import Difference, comparison_rows, differences

_SHORT_UNITS = {"requests/s": "req/s"}
_BREAK = re.compile(r"\s+|(?<=-)")
_SHORT_HEADING = 10  # characters; shorter ones stay on one line


def comparison_table(report: Report) -> Table:
    """One line a figure, one column a run, and how many times better each later run is than the first."""
    first, *later = report.compared
    table = _table(report.title, caption=f"x: times better than {first.name}" if later else None)
    rows = comparison_rows(report.compared)
    _add_run_column(table, first.name, [row.text(0) for row in rows])
    for index, run in enumerate(later, 1):
        _add_run_column(table, run.name, [row.text(index) for row in rows])
        table.add_column("x", justify="right", style="bold", no_wrap=True)
    for row in rows:
        cells = [f"{row.label} [dim]{_SHORT_UNITS.get(row.unit, row.unit)}[/dim]", row.text(0)]
        for index in range(1, len(later) + 1):
            ratio = row.ratio(index)
            cells += [row.text(index), "" if ratio is None else f"{ratio:.2f}"]
        table.add_row(*cells)
    return table


def _table(title: str, *, caption: str | None) -> Table:
    """Without lines between columns: three runs fit into 80 characters."""
    table = Table(
        title=title, caption=caption, caption_justify="left", box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False
    )
    table.add_column("", no_wrap=True)
    return table


def _add_run_column(table: Table, name: str, values: Sequence[str]) -> None:
    """Hardly wider than its values: its heading wraps at blanks and hyphens, values never."""
    width = max(map(len, (*_BREAK.split(name), *values)))
    heading = "\n".join(textwrap.wrap(name, max(width, _SHORT_HEADING), break_long_words=False))
    table.add_column(heading, justify="right", min_width=width)


def agreement_table(report: Report) -> Table | None:
    """Each pair of runs that ought to agree, and how far apart they are; None if the report has no pairs."""
    if not report.pairs:
        return None
    table = _table("Agreement", caption="%: of the left against the right")
    found = [{d.label: d for d in differences(report.run(m), report.run(e))} for m, e in report.pairs]
    labels = tuple(dict.fromkeys(label for column in found for label in column))
    cells = [[_difference_cells(column.get(label)) for label in labels] for column in found]
    for (measured, expected), rows in zip(report.pairs, cells, strict=True):
        beside = expected.removeprefix(measured).strip(" ()") or expected
        for position, heading in enumerate((measured, beside, "%")):
            _add_run_column(table, heading, [row[position] for row in rows])
    for number, label in enumerate(labels):
        table.add_row(label, *(cell for rows in cells for cell in rows[number]))
    return table


def _difference_cells(difference: Difference | None) -> tuple[str, str, str]:
    if difference is None:
        return ("–", "–", "–")
    measured, expected = (f"{v:,.{difference.decimals}f}" for v in (difference.measured, difference.expected))
    return measured, expected, "–" if difference.percent is None else f"{difference.percent:+.1f}"


def trouble_lines(report: Report) -> list[str]:
    """A line for each kind of failure of each run, with the first such error, and each run's notes."""
    lines = [f"{run.name}: {count} × {error}" for run in report.runs for error, count in run.failures.items()]
    return lines + [f"{run.name}: {note}" for run in report.runs for note in run.notes]


def require_answers(report: Report) -> None:
    """Raises: click.ClickException naming the compared runs of which no request completed: a script must not go on."""
    empty = [run.name for run in report.compared if not run.summary.completed]
    if empty:
        raise click.ClickException(f"no request was answered in {', '.join(empty)}")
