"""A study's figures as one PNG: a row for each panel, a column for each figure."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Drawing
from matplotlib.ticker import LogLocator, NullFormatter

from kvrouting_simulator.report.plots import STYLE
from kvrouting_simulator.study.definition import Axis, Point
from kvrouting_simulator.study.evidence import Evidence
from kvrouting_simulator.study.figures import FIGURES

_COLOURS = mpl.color_sequences["tab10"]
_MARKERS = "osD^vPX*<>"
_DPI = 80


def chart_png(evidence: Evidence) -> bytes:
    """Mean over the seeds with its standard deviation: lines along `x`, or bars without one."""
    study = evidence.study
    panels = _panels(evidence)
    bars = not study.x
    height = 0.28 * len(study.axis(study.series).points) + 0.9 if bars else 2.9
    with mpl.rc_context(STYLE):
        drawing = Drawing(figsize=(4.1 * len(study.plots), height * len(panels) + 0.4), layout="constrained")
        grid = drawing.subplots(len(panels), len(study.plots), squeeze=False)
        for panel, row in zip(panels, grid, strict=True):
            for figure, axes in zip(study.plots, row, strict=True):
                (_bars if bars else _lines)(axes, evidence, panel, figure)
                axes.set_title(", ".join(panel.values()), fontsize=9)
        if not bars:
            handles, labels = grid[0][0].get_legend_handles_labels()
            drawing.legend(handles, labels, loc="outside lower center", ncols=min(4, len(labels)), fontsize=8)
        buffer = io.BytesIO()
        drawing.savefig(buffer, format="png", dpi=_DPI, metadata={"Software": None})
    return buffer.getvalue()


def _panels(evidence: Evidence) -> Sequence[Mapping[str, str]]:
    """Labels of each panel: the axes that are neither x nor series."""
    study = evidence.study
    others = [axis for axis in study.axes if axis.name not in (study.x, study.series)]
    choices = product(*(axis.points for axis in others))
    return [{a.name: p.label for a, p in zip(others, points, strict=True)} for points in choices]


def _lines(axes: Axes, evidence: Evidence, panel: Mapping[str, str], figure: str) -> None:
    x = evidence.study.axis(evidence.study.x)
    places = _positions(x)
    for number, point in enumerate(evidence.study.axis(evidence.study.series).points):
        found = [
            (place, spread)
            for place, at in zip(places, x.points, strict=True)
            if (spread := _spread(evidence, panel, point, at, figure)) is not None
        ]
        axes.errorbar(
            [place for place, _ in found],
            [spread.mean for _, spread in found],
            yerr=[spread.sd for _, spread in found],
            label=point.label,
            color=_COLOURS[number % len(_COLOURS)],
            marker=_MARKERS[number % len(_MARKERS)],
            markersize=4,
            linewidth=1.3,
            capsize=2,
        )
    axes.set_xticks(places, [point.label for point in x.points])
    axes.set_xlabel(f"{x.name} [{x.unit}]" if x.unit else x.name)
    axes.set_ylabel(FIGURES[figure].heading)
    if FIGURES[figure].unit == "s":
        _log_scale(axes)


def _positions(axis: Axis) -> list[float]:
    numbers = [point.number for point in axis.points]
    if any(number is None for number in numbers):
        return [float(place) for place in range(len(numbers))]
    return [number for number in numbers if number is not None]


def _spread(evidence: Evidence, panel: Mapping[str, str], series: Point, at: Point, figure: str) -> Any:
    study = evidence.study
    return evidence.spread({**panel, study.series: series.label, study.x: at.label}, figure)


def _bars(axes: Axes, evidence: Evidence, panel: Mapping[str, str], figure: str) -> None:
    points = evidence.study.axis(evidence.study.series).points
    for number, point in enumerate(points):
        spread = evidence.spread({**panel, evidence.study.series: point.label}, figure)
        if spread is not None:
            axes.barh(number, spread.mean, xerr=spread.sd, color=_COLOURS[number % len(_COLOURS)], height=0.7)
    axes.set_yticks(range(len(points)), [point.label for point in points], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel(FIGURES[figure].heading)


def _log_scale(axes: Axes) -> None:
    """Times of policies differ by factors; marks at 1, 2 and 5 as plain numbers."""
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(lambda value, _position: f"{value:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
