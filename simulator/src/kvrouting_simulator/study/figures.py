"""The figures of a cell: their names, units and how they are read from a run's summary."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from kvrouting_simulator.report import Percentiles, Summary


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """label, unit: for a reader. decimals: as pages show it; tables of numbers have three more."""

    name: str
    label: str
    unit: str
    decimals: int
    value: Callable[[Summary], float | None] | None = None

    @property
    def heading(self) -> str:
        """Label and unit."""
        return f"{self.label} [{self.unit}]" if self.unit else self.label


def _seconds(distribution: Callable[[Summary], Percentiles | None], of: str) -> Callable[[Summary], float | None]:
    def value(summary: Summary) -> float | None:
        found = distribution(summary)
        return None if found is None else float(getattr(found, of)) / 1000

    return value


def _distribution(name: str, label: str, distribution: Callable[[Summary], Percentiles | None]) -> list[Figure]:
    return [
        Figure(
            name=f"{name}_{p}_s", label=f"{label} {p.upper()}", unit="s", decimals=2, value=_seconds(distribution, p)
        )
        for p in ("p50", "p95", "p99")
    ]


_ALL = (
    Figure(name="hit_rate", label="hit rate", unit="", decimals=3, value=lambda s: s.hit_rate),
    *_distribution("latency", "latency", lambda s: s.latency),
    *_distribution("ttft", "TTFT", lambda s: s.ttft),
    Figure(name="throughput_per_s", label="throughput", unit="req/s", decimals=2, value=lambda s: s.throughput_per_s),
    Figure(name="goodput_per_s", label="goodput", unit="req/s", decimals=2, value=lambda s: s.goodput_per_s),
    Figure(name="imbalance", label="imbalance", unit="", decimals=3, value=lambda s: s.imbalance),
    Figure(name="requests", label="requests", unit="", decimals=0, value=lambda s: float(s.requests)),
    Figure(name="completed", label="completed", unit="", decimals=0, value=lambda s: float(s.completed)),
    Figure(name="capacity_per_s", label="capacity", unit="req/s", decimals=2),
    Figure(name="decision_us", label="routing", unit="µs/request", decimals=0),
    Figure(name="eviction_us", label="eviction", unit="µs/request", decimals=0),
)
FIGURES: Mapping[str, Figure] = MappingProxyType({figure.name: figure for figure in _ALL})
SHOWN = tuple(
    figure.name for figure in _ALL if figure.value is not None and figure.name not in ("requests", "completed")
)
"""The columns of a page's table."""
MEASURED = ("decision_us", "eviction_us")
"""Times of the machine that ran it: they differ from run to run."""


def of_summary(summary: Summary) -> dict[str, float | None]:
    """Every figure that a run has."""
    return {figure.name: figure.value(summary) for figure in _ALL if figure.value is not None}
