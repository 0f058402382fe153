"""The comparison in a terminal."""

from __future__ import annotations

import click
from rich.table import Table

from kvrouting_simulator.report.document import Report
from kvrouting_simulator.report.rows import Difference, comparison_rows, differences


def comparison_table(report: Report) -> Table:
    """One line a figure, one column a run, and how many times better each later run is than the first."""
    first, *later = report.compared
    table = Table(
        title=report.title, caption=f"x: times better than {first.name}" if later else None, caption_justify="left"
    )
    table.add_column("")
    table.add_column(first.name, justify="right")
    for run in later:
        table.add_column(run.name, justify="right")
        table.add_column("x", justify="right", style="bold")
    for row in comparison_rows(report.compared):
        cells = [f"{row.label} [dim]{row.unit}[/dim]", row.text(0)]
        for index in range(1, len(later) + 1):
            ratio = row.ratio(index)
            cells += [row.text(index), "" if ratio is None else f"{ratio:.2f}"]
        table.add_row(*cells)
    return table


def agreement_table(report: Report) -> Table | None:
    """Each pair of runs that ought to agree, and how far apart they are; None if the report has no pairs."""
    if not report.pairs:
        return None
    table = Table(title="Agreement", caption="%: of the left against the right", caption_justify="left")
    table.add_column("")
    for measured, expected in report.pairs:
        beside = expected.removeprefix(measured).strip(" ()") or expected
        for heading in (measured, beside, "%"):
            table.add_column(heading, justify="right")
    columns = [{d.label: d for d in differences(report.run(m), report.run(e))} for m, e in report.pairs]
    for label in dict.fromkeys(label for column in columns for label in column):
        found = [column.get(label) for column in columns]
        table.add_row(label, *(cell for d in found for cell in _difference_cells(d)))
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
