"""The comparison in a terminal."""

from __future__ import annotations

from rich.table import Table

from kvrouting_simulator.report.document import Report
from kvrouting_simulator.report.rows import comparison_rows, differences


def comparison_table(report: Report) -> Table:
    """One line a figure, one column a run, and how many times better each later run is than the first."""
    first = report.runs[0].name
    table = Table(
        title=report.title,
        caption=f"x: times better than {first}" if len(report.runs) > 1 else None,
        caption_justify="left",
    )
    table.add_column("")
    table.add_column(first, justify="right")
    for run in report.runs[1:]:
        table.add_column(run.name, justify="right")
        table.add_column("x", justify="right", style="bold")
    for row in comparison_rows(report.runs):
        cells = [f"{row.label} [dim]{row.unit}[/dim]", row.text(0)]
        for index in range(1, len(report.runs)):
            ratio = row.ratio(index)
            cells += [row.text(index), "" if ratio is None else f"{ratio:.2f}"]
        table.add_row(*cells)
    return table


def trouble_lines(report: Report) -> list[str]:
    """A line for each kind of failure of each run, and each run's notes."""
    lines = [f"{run.name}: {count} × {kind}" for run in report.runs for kind, count in run.summary.failures.items()]
    return lines + [f"{run.name}: {note}" for run in report.runs for note in run.notes]


def agreement_table(report: Report) -> Table | None:
    """How far each pair of runs that ought to agree is apart; None if the report has no pairs."""
    if not report.pairs:
        return None
    table = Table(title="Agreement")
    table.add_column("")
    for measured, expected in report.pairs:
        table.add_column(f"{measured} / {expected}", justify="right")
    columns = [differences(report.run(m), report.run(e)) for m, e in report.pairs]
    for label in dict.fromkeys(d.label for column in columns for d in column):
        cells = [next((d.percent for d in column if d.label == label), None) for column in columns]
        table.add_row(label, *("–" if percent is None else f"{percent:+.1f} %" for percent in cells))
    return table
