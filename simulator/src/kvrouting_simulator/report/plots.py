"""Plots of runs as SVG text. Pure: records in, SVG out; the same runs give the same bytes."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvrouting_simulator.report.document import Run
from kvrouting_simulator.report.records import RequestRecord

# Okabe and Ito's palette: told apart by colour-blind readers too.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
WINDOWS = 30  # of equal time, in the plots over time

# The keys are a type of their own in newer versions of matplotlib alone.
STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.8,
    "axes.axisbelow": True,
    "axes.edgecolor": "#888888",
    "legend.frameon": False,
    "svg.hashsalt": "kvrouting",
    "svg.fonttype": "path",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Plot:
    """One drawing. alt: what it shows, for those who cannot see it."""

    title: str
    caption: str
    alt: str
    svg: str


def plots(runs: Sequence[Run]) -> tuple[Plot, ...]:
    """Every plot of a report, in reading order. Runs without a completed request draw nothing."""
    drawn = [run for run in runs if run.summary.completed]
    if not drawn:
        return ()
    with mpl.rc_context(STYLE):
        return (_distributions(drawn), _latency_over_time(drawn), _hit_rate_over_time(drawn), _loads(drawn))


def _svg(figure: Figure) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def _figure(rows: int, columns: int, *, height: float, share: bool = False) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(10, height), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, sharex=share, sharey=share)
    return figure, list(axes.flat)


def _completed(run: Run) -> list[RequestRecord]:
    return [r for r in run.records if r.completed]


def _seconds(axes: Axes) -> None:
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda value, _position: f"{value:g}")


def _distributions(runs: Sequence[Run]) -> Plot:
    figure, (latency, ttft) = _figure(1, 2, height=3.8)
    for axes, name, value in (
        (latency, "Latency", lambda r: r.latency_ms),
        (ttft, "Time to first token", lambda r: r.ttft_ms),
    ):
        _draw_cdf(axes, runs, value)
        axes.set_title(name)
        axes.set_xlabel("s (log scale)")
        axes.set_ylim(0, 100.5)
        _seconds(axes)
    latency.set_ylabel("% of completed requests")
    ttft.legend(loc="lower right")
    return Plot(
        title="Latency and time to first token",
        caption="Share of completed requests that took at most so long, counted from the moment each was due. "
        "Further left is better; the dotted lines are P50 and P95.",
        alt="Two cumulative distributions: latency and time to first token, one curve a run.",
        svg=_svg(figure),
    )


def _draw_cdf(axes: Axes, runs: Sequence[Run], value: Callable[[RequestRecord], float | None]) -> None:
    for run, colour in zip(runs, _colours(len(runs)), strict=True):
        seconds = np.sort([v / 1000 for r in _completed(run) if (v := value(r)) is not None])
        if not len(seconds):
            continue
        seconds = np.maximum(seconds, 1e-4)  # a log scale has no zero
        share = 100 * np.arange(1, len(seconds) + 1) / len(seconds)
        axes.step(seconds, share, where="post", color=colour, label=run.name)
    for percent in (50, 95):
        axes.axhline(percent, color="#555555", linewidth=1.0, linestyle=":")


def _colours(count: int) -> list[str]:
    return [COLOURS[i % len(COLOURS)] for i in range(count)]


def _latency_over_time(runs: Sequence[Run]) -> Plot:
    figure, panels = _figure(len(runs), 1, height=0.6 + 2.2 * len(runs), share=True)
    for axes, run, colour in zip(panels, runs, _colours(len(runs)), strict=True):
        records = _completed(run)
        seconds = np.array([r.arrival_ms / 1000 for r in records])
        latency = np.maximum(np.array([r.latency_ms / 1000 for r in records]), 1e-4)
        axes.plot(seconds, latency, ".", color=colour, alpha=0.25, markersize=4, rasterized=len(records) > 3000)
        centres, medians = _windowed_median(seconds, latency)
        axes.plot(centres, medians, color=colour, linewidth=2)
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _position: f"{value:g}")
        axes.set_title(run.name)
        axes.set_ylabel("latency (s, log)")
        _draw_marks(axes, run)
    panels[-1].set_xlabel("arrival (s since the start of the run)")
    return Plot(
        title="Latency over time",
        caption="Each dot is a request at its arrival; the line is the median of a window. Vertical lines: a worker "
        "was killed or came back.",
        alt="Latency of each request by its arrival, one panel a run, with kills and returns marked.",
        svg=_svg(figure),
    )


def _windowed_median(seconds: np.ndarray, values: np.ndarray) -> tuple[list[float], list[float]]:
    edges = np.linspace(0, max(float(seconds.max()), 1e-3), WINDOWS + 1)
    window = np.clip(np.digitize(seconds, edges) - 1, 0, WINDOWS - 1)
    centres, medians = [], []
    for index in range(WINDOWS):
        inside = values[window == index]
        if len(inside):
            centres.append(float(edges[index] + edges[index + 1]) / 2)
            medians.append(float(np.median(inside)))
    return centres, medians


def _draw_marks(axes: Axes, run: Run, *, labelled: bool = True) -> None:
    for mark in run.marks:
        killed = mark.kind == "killed"
        colour = "#B00020" if killed else "#2E7D32"
        axes.axvline(mark.at_ms / 1000, color=colour, linewidth=1.2, linestyle="--" if killed else "-")
        axes.annotate(
            f"{mark.worker} {mark.kind}" if labelled else "",
            xy=(mark.at_ms / 1000, 1),
            xycoords=("data", "axes fraction"),
            xytext=(3, -3 if killed else -14),
            textcoords="offset points",
            va="top",
            fontsize=8,
            color=colour,
        )


def _hit_rate_over_time(runs: Sequence[Run]) -> Plot:
    figure, (axes,) = _figure(1, 1, height=3.4)
    for run, colour in zip(runs, _colours(len(runs)), strict=True):
        records = _completed(run)
        seconds = np.array([r.arrival_ms / 1000 for r in records])
        edges = np.linspace(0, max(float(seconds.max()), 1e-3), WINDOWS + 1)
        prompt, _ = np.histogram(seconds, bins=edges, weights=[r.prompt_tokens for r in records])
        cached, _ = np.histogram(seconds, bins=edges, weights=[r.cached_tokens for r in records])
        filled = prompt > 0
        centres = (edges[:-1] + edges[1:]) / 2
        share = 100 * cached[filled] / prompt[filled]
        axes.plot(centres[filled], share, color=colour, linewidth=1.8, label=run.name)
        _draw_marks(axes, run, labelled=run is runs[0])
    axes.set_ylim(bottom=0)
    axes.set_ylabel("hit rate (% of prompt tokens)")
    axes.set_xlabel("arrival (s since the start of the run)")
    axes.legend(loc="lower right")
    return Plot(
        title="Cache hit rate over time",
        caption="Cached prompt tokens / prompt tokens of the requests that arrived in each window.",
        alt="Token-weighted hit rate by time window, one line a run.",
        svg=_svg(figure),
    )


def _loads(runs: Sequence[Run]) -> Plot:
    workers = sorted({load.worker for run in runs for load in run.summary.workers})
    figure, (axes,) = _figure(1, 1, height=3.4)
    width = 0.8 / len(runs)
    for index, (run, colour) in enumerate(zip(runs, _colours(len(runs)), strict=True)):
        loads = {load.worker: load for load in run.summary.workers}
        places = np.arange(len(workers)) - 0.4 + width * (index + 0.5)
        uncached = [loads[w].uncached_tokens / 1000 if w in loads else 0 for w in workers]
        cached = [loads[w].cached_tokens / 1000 if w in loads else 0 for w in workers]
        axes.bar(places, uncached, width * 0.9, color=colour, label=run.name)
        axes.bar(places, cached, width * 0.9, bottom=uncached, color=colour, alpha=0.3)
    axes.set_xticks(range(len(workers)), workers)
    axes.grid(visible=False, axis="x")
    axes.set_ylabel("prompt tokens (thousands)")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    return Plot(
        title="Load of each worker",
        caption="Prompt tokens of completed requests: solid is what had to be prefilled, pale what was cached.",
        alt="Bars of prefilled and cached prompt tokens for each worker, grouped by run.",
        svg=_svg(figure),
    )
