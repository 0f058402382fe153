"""The report as one HTML file that needs nothing else: no script, no font, no network."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape
from pathlib import Path

from kvrouting_simulator.report.document import Report, Run
from kvrouting_simulator.report.plots import Plot, plots
from kvrouting_simulator.report.rows import Row, comparison_rows, differences
from kvrouting_simulator.report.summary import PERCENTILE_DEFINITION

_CSS = """
:root { color-scheme: light; }
body { margin: 0; background: #f6f7f9; color: #1c2330; font: 15px/1.5 system-ui, "Segoe UI", sans-serif; }
main { max-width: 1040px; margin: 0 auto; padding: 32px 24px 64px; }
h1 { font-size: 26px; margin: 0 0 8px; }
h2 { font-size: 19px; margin: 36px 0 8px; }
section { background: #fff; border: 1px solid #e3e6eb; border-radius: 8px; padding: 16px 20px; margin: 12px 0; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: 5px 10px; text-align: right; border-bottom: 1px solid #eef0f3; }
th:first-child, td:first-child, th.unit { text-align: left; }
thead th { border-bottom: 2px solid #c9cfd8; vertical-align: bottom; }
td.unit { color: #6a7383; text-align: left; }
td.ratio { font-weight: 600; }
td.better { color: #18794e; }
td.worse { color: #b42318; }
figure { margin: 0; }
figure img { width: 100%; height: auto; }
figcaption, .small { color: #566072; font-size: 13px; }
.scroll { overflow-x: auto; }
ul { margin: 6px 0; padding-left: 20px; }
"""


def render_page(report: Report) -> str:
    """The whole document. Each figure carries its exact value, as the JSON has it, in `data-value`."""
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(report.title)}</title><style>{_CSS}</style></head><body><main>",
        f"<h1>{escape(report.title)}</h1>",
        *(f"<p>{escape(line)}</p>" for line in report.introduction),
        "<h2>Figures</h2>",
        _figures_table(report),
        _troubles(report.runs),
        *(_plot(plot) for plot in plots(report.compared)),
        _agreement(report),
        "<h2>Workers</h2>",
        _workers_table(report.compared),
        "<h2>Settings</h2>",
        _settings_table(report.runs),
        "</main></body></html>",
    ]
    return "\n".join(parts) + "\n"


def save_page(report: Report, path: Path) -> None:
    """Writes the document; the folder is made if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render_page(report), encoding="utf-8")


def _table(header: Sequence[str], rows: Sequence[str]) -> str:
    head = "".join(f'<th class="{cell if cell == "unit" else ""}">{escape(cell)}</th>' for cell in header)
    body = "\n".join(rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table></div>'


def _figures_table(report: Report) -> str:
    first, *later = report.compared
    header = ["", "unit", first.name]
    for run in later:
        header += [run.name, "times better"]
    rows = [_figures_row(row, len(report.compared)) for row in comparison_rows(report.compared)]
    return f"<section>{_table(header, rows)}{_figures_note(report.compared)}</section>"


def _figures_note(runs: Sequence[Run]) -> str:
    sentences = [
        PERCENTILE_DEFINITION,
        "Latency and time to first token count from the moment a request was due, whenever it was sent.",
    ]
    if len(runs) > 1:
        sentences.append(f"Times better: against {runs[0].name}; above 1 is an improvement.")
    targets = sorted({t for run in runs if (t := run.summary.goodput_ttft_ms) is not None})
    if targets:
        sentences.append(f"TTFT target: {', '.join(f'{t:g} ms' for t in targets)}.")
    bases = sorted({run.summary.imbalance_of for run in runs})
    sentences.append(f"Load imbalance is that of {' / '.join(bases)}.")
    return f'<p class="small">{escape(" ".join(sentences))}</p>'


def _figures_row(row: Row, runs: int) -> str:
    cells = [f"<td>{escape(row.label)}</td>", f'<td class="unit">{escape(row.unit)}</td>', _value_cell(row, 0)]
    for index in range(1, runs):
        ratio = row.ratio(index)
        cells.append(_value_cell(row, index))
        if ratio is None:
            cells.append("<td></td>")
        else:
            judged = "better" if ratio > 1.005 else "worse" if ratio < 0.995 else ""
            cells.append(f'<td class="ratio {judged}">{ratio:.2f}</td>')
    return f"<tr>{''.join(cells)}</tr>"


def _value_cell(row: Row, index: int) -> str:
    value = row.values[index]
    exact = "" if value is None else f' data-value="{value!r}"'
    return f"<td{exact}>{row.text(index)}</td>"


def _agreement(report: Report) -> str:
    sections = []
    for measured, expected in report.pairs:
        rows = []
        for found in differences(report.run(measured), report.run(expected)):
            percent = "–" if found.percent is None else f"{found.percent:+.1f} %"
            cells = "".join(
                f'<td data-value="{value!r}">{value:,.{found.decimals}f}</td>'
                for value in (found.measured, found.expected)
            )
            cells += f"<td>{escape(percent)}</td>"
            rows.append(f'<tr><td>{escape(found.label)}</td><td class="unit">{escape(found.unit)}</td>{cells}</tr>')
        sections.append(f"<section>{_table(['', 'unit', measured, expected, 'difference'], rows)}</section>")
    return "\n".join(["<h2>Agreement</h2>", *sections]) if sections else ""


def _troubles(runs: Sequence[Run]) -> str:
    items = [
        f"<li>{escape(run.name)}: {count} request{'s' if count > 1 else ''} failed with {escape(error)}</li>"
        for run in runs
        for error, count in run.failures.items()
    ]
    items += [f"<li>{escape(run.name)}: {escape(note)}</li>" for run in runs for note in run.notes]
    if not items:
        return ""
    return f"<h2>Notes</h2><section><ul>{''.join(items)}</ul></section>"


def _plot(plot: Plot) -> str:
    data = base64.b64encode(plot.svg.encode()).decode()
    return (
        f"<h2>{escape(plot.title)}</h2><section><figure>"
        f'<img alt="{escape(plot.alt)}" src="data:image/svg+xml;base64,{data}">'
        f"<figcaption>{escape(plot.caption)}</figcaption></figure></section>"
    )


def _workers_table(runs: Sequence[Run]) -> str:
    rows = []
    for run in runs:
        for load in run.summary.workers:
            share = f"{100 * load.cached_tokens / load.prompt_tokens:.1f}" if load.prompt_tokens else "–"
            busy = "–" if load.busy_ms is None else f"{load.busy_ms / 1000:,.1f}"
            cells = (run.name, load.worker, f"{load.completed:,}", f"{load.uncached_tokens:,}", share, busy)
            rows.append(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>")
    header = ("run", "worker", "requests", "prefilled tokens", "hit rate %", "busy s")
    return f"<section>{_table(header, rows)}</section>"


def _settings_table(runs: Sequence[Run]) -> str:
    names = dict.fromkeys(name for run in runs for name in run.parameters)
    rows = []
    for name in names:
        cells = [name, *(_setting(run.parameters.get(name)) for run in runs)]
        rows.append(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>")
    return f"<section>{_table(['', *(run.name for run in runs)], rows)}</section>"


def _setting(value: str | float | bool | None) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)
