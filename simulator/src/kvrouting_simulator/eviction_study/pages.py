"""The table and the plot of a study. Pure: outcomes in, text and image out."""

from __future__ import annotations

import io
import statistics
from collections.abc import Iterable, Mapping

import matplotlib as mpl
from matplotlib.figure import Figure

from kvrouting_simulator.eviction_study.loads import LOADS
from kvrouting_simulator.eviction_study.outcomes import POLICY_TITLES, Case, Outcome
from kvrouting_simulator.report.plots import COLOURS, STYLE

PLOTTED = ("gsp-random", "stack-distance", "mooncake")
STUDY_PAGE_SIZE = 64


def table(outcomes: Iterable[Outcome]) -> str:
    """Markdown: a line for each load and capacity, mean ± standard deviation over the seeds, the best in bold."""
    rates = _rates(outcomes)
    lines = [
        "| load | capacity | " + " | ".join(POLICY_TITLES.values()) + " |",
        "|---" * (2 + len(POLICY_TITLES)) + "|",
    ]
    for load, about in LOADS.items():
        for capacity in about.capacities_tokens:
            row = {policy: rates.get((load, capacity, STUDY_PAGE_SIZE, policy)) for policy in POLICY_TITLES}
            if any(row.values()):
                cells = " | ".join(_cells(row))
                lines.append(f"| {about.about} | {capacity // 1000}k | {cells} |")
    return "\n".join(lines) + "\n"


def blocks(outcomes: Iterable[Outcome]) -> str:
    """Markdown: rlt-adaptive at page size 1, where it keeps blocks of 64 tokens, against page size 64."""
    rates = _rates(outcomes)
    lines = ["| load | capacity | page size 1 | page size 64 |", "|---|---|---|---|"]
    for load, about in LOADS.items():
        for capacity in about.capacities_tokens:
            pair = [rates.get((load, capacity, size, "rlt-adaptive")) for size in (1, STUDY_PAGE_SIZE)]
            if all(pair):
                lines.append(f"| {about.about} | {capacity // 1000}k | " + " | ".join(map(_cell, pair)) + " |")
    return "\n".join(lines) + "\n" if len(lines) > 2 else ""


def plot(outcomes: Iterable[Outcome]) -> bytes:
    """PNG: hit rate over capacity, a field for each of three loads, a line for each policy."""
    rates = _rates(outcomes)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(12, 4), layout="constrained")
        axes = figure.subplots(1, len(PLOTTED))
        for field, load in zip(axes, PLOTTED, strict=True):
            field.set_title(LOADS[load].about)
            field.set_xlabel("cache, thousand tokens")
            for colour, (policy, title) in zip(COLOURS, POLICY_TITLES.items(), strict=False):
                points = [
                    (capacity / 1000, statistics.fmean(rates[key]))
                    for capacity in LOADS[load].capacities_tokens
                    if (key := (load, capacity, STUDY_PAGE_SIZE, policy)) in rates
                ]
                if points:
                    style = {"color": colour, "marker": "o", "linewidth": 2.5 if policy == "rlt-adaptive" else 1.2}
                    field.plot(*zip(*points, strict=True), label=title, **style)
            field.set_ylim(bottom=0)
        axes[0].set_ylabel("hit rate (tokens)")
        lines = {str(line.get_label()): line for field in axes for line in field.get_lines()}
        if lines:
            figure.legend(list(lines.values()), list(lines), loc="outside right center", fontsize=9)
        image = io.BytesIO()
        figure.savefig(image, format="png", dpi=110, metadata={"Software": None})
    return image.getvalue()


_Rates = Mapping[tuple[str, int, int, str], list[float]]


def _rates(outcomes: Iterable[Outcome]) -> _Rates:
    rates: dict[tuple[str, int, int, str], list[float]] = {}
    for outcome in outcomes:
        case: Case = outcome.case
        rates.setdefault((case.load, case.capacity_tokens, case.page_size, case.policy), []).append(outcome.hit_rate)
    return rates


def _cells(row: Mapping[str, list[float] | None]) -> list[str]:
    real = {policy: statistics.fmean(rates) for policy, rates in row.items() if rates and policy != "opt"}
    best = max(real, key=lambda policy: real[policy])
    return [f"**{_cell(rates)}**" if policy == best else _cell(rates) for policy, rates in row.items()]


def _cell(rates: list[float] | None) -> str:
    if not rates:
        return "–"
    mean = f"{statistics.fmean(rates):.3f}".removeprefix("0")
    return f"{mean} ± {statistics.stdev(rates):.3f}".replace("± 0.", "± .") if len(rates) > 1 else mean
