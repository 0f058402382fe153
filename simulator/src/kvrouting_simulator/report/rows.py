"""The lines of the comparison: one figure of each run, its unit, and which direction is better."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvrouting_simulator.report.document import Run
from kvrouting_simulator.report.summary import Percentiles, Summary


class Better(enum.Enum):
    """Which direction is an improvement."""

    LOWER = "lower"
    HIGHER = "higher"
    NEITHER = "neither"


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One figure of every run, in their order; None where a run does not have it."""

    label: str
    unit: str
    better: Better
    decimals: int
    values: tuple[float | None, ...]

    def text(self, index: int) -> str:
        """The value as it is shown; an en dash for none."""
        value = self.values[index]
        return "–" if value is None else f"{value:,.{self.decimals}f}"

    def ratio(self, index: int) -> float | None:
        """How many times better than the first run; None where that means nothing."""
        base, value = self.values[0], self.values[index]
        if self.better is Better.NEITHER or not base or not value:
            return None
        return base / value if self.better is Better.LOWER else value / base


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """One figure of two runs that ought to agree. percent: of measured against expected; None if that has no sense."""

    label: str
    unit: str
    measured: float
    expected: float
    decimals: int

    @property
    def percent(self) -> float | None:
        """100·(measured / expected − 1)."""
        return 100 * (self.measured / self.expected - 1) if self.expected else None


def differences(measured: Run, expected: Run) -> tuple[Difference, ...]:
    """Each figure with a direction that both runs have."""
    found = []
    for row in comparison_rows((measured, expected)):
        left, right = row.values
        if row.better is not Better.NEITHER and left is not None and right is not None:
            found.append(
                Difference(label=row.label, unit=row.unit, measured=left, expected=right, decimals=row.decimals)
            )
    return tuple(found)


Value = Callable[[Summary], "float | None"]


def comparison_rows(runs: Sequence[Run]) -> tuple[Row, ...]:
    """The figures of the runs. A figure that no run has is left out, as are counts of trouble that nobody had."""
    rows: list[Row] = []
    for label, unit, better, decimals, value in _FIGURES:
        values = tuple(value(run.summary) for run in runs)
        if any(v is not None for v in values):
            rows.append(Row(label=label, unit=unit, better=better, decimals=decimals, values=values))
    for label, count in _TROUBLES:
        counts = tuple(float(count(run.summary)) for run in runs)
        if any(counts) or label == "lost":
            rows.append(Row(label=label, unit="requests", better=Better.NEITHER, decimals=0, values=counts))
    return tuple(rows)


def _of(distribution: Callable[[Summary], Percentiles | None], figure: Callable[[Percentiles], float]) -> Value:
    def value(summary: Summary) -> float | None:
        found = distribution(summary)
        return None if found is None else figure(found)

    return value


def _percent(summary: Summary) -> float | None:
    return None if summary.hit_rate is None else 100 * summary.hit_rate


def _distribution_figures(
    name: str, distribution: Callable[[Summary], Percentiles | None], decimals: int
) -> list[tuple[str, str, Better, int, Value]]:
    figures: list[tuple[str, Callable[[Percentiles], float]]] = [
        ("P50", lambda p: p.p50),
        ("P95", lambda p: p.p95),
        ("P99", lambda p: p.p99),
    ]
    return [(f"{name} {p}", "ms", Better.LOWER, decimals, _of(distribution, f)) for p, f in figures]


_FIGURES: Sequence[tuple[str, str, Better, int, Value]] = (
    ("hit rate", "% of tokens", Better.HIGHER, 2, _percent),
    *_distribution_figures("latency", lambda s: s.latency, 0),
    *_distribution_figures("TTFT", lambda s: s.ttft, 0),
    ("time per token P50", "ms", Better.LOWER, 1, _of(lambda s: s.tpot, lambda p: p.p50)),
    ("throughput", "requests/s", Better.HIGHER, 2, lambda s: s.throughput_per_s),
    ("goodput at TTFT target", "requests/s", Better.HIGHER, 2, lambda s: s.goodput_per_s),
    ("load imbalance", "max/mean", Better.LOWER, 3, lambda s: s.imbalance),
    ("requests", "", Better.NEITHER, 0, lambda s: float(s.requests)),
    ("completed", "requests", Better.NEITHER, 0, lambda s: float(s.completed)),
    ("sending late P99", "ms", Better.NEITHER, 1, _of(lambda s: s.lateness, lambda p: p.p99)),
)

_TROUBLES: Sequence[tuple[str, Callable[[Summary], int]]] = (
    ("lost", lambda s: s.lost),
    ("refused", lambda s: s.refused),
    ("cancelled", lambda s: s.cancelled),
    ("cut, sent again", lambda s: s.resubmitted),
)
