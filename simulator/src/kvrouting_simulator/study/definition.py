"""What a study is: axes along which scenarios differ, claims to be held against the runs, and texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Literal, get_args

from kvrouting_simulator.bounds import one_of
from kvrouting_simulator.experiment.memory import SET_UPS
from kvrouting_simulator.study.cell import CapacitySearch, Cell, CellKind
from kvrouting_simulator.study.figures import FIGURES
from kvrouting_simulator.study.paths import changed
from kvrouting_simulator.study.wording import places

ClaimForm = Literal["ratio", "percent", "difference", "value"]


class StudyError(ValueError):
    """A study that cannot be run; the message names file and value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One place on an axis. changes: of the scenario, by dotted path. kind: how its cells are run; None: as usual."""

    label: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    kind: CellKind | None = None
    number: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Axis:
    """name: as claims and tables call it. unit: of numeric points."""

    name: str
    points: tuple[Point, ...]
    unit: str = ""

    def __post_init__(self) -> None:
        labels = [point.label for point in self.points]
        if not labels:
            raise StudyError(f"axis {self.name!r} has no points")
        if len(set(labels)) != len(labels):
            raise StudyError(f"axis {self.name!r} has two points of one label: {', '.join(labels)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """A number of the runs, beside what the paper says.

    form: `ratio` figure(of) / figure(over); `percent` 100·(ratio − 1); `difference` of − over; `value` of.
    of, over: labels by axis; an axis that is not named is averaged over, pair by pair.
    """

    name: str
    says: str
    figure: str
    form: ClaimForm
    of: Mapping[str, str]
    over: Mapping[str, str] = field(default_factory=dict)
    paper: str = ""
    decimals: int = 2

    def __post_init__(self) -> None:
        if self.figure not in FIGURES:
            raise StudyError(f"claim {self.name!r}: no figure {self.figure!r}; known: {', '.join(FIGURES)}")
        if (self.form == "value") == bool(self.over):
            raise StudyError(f"claim {self.name!r}: form {self.form!r} {'takes no' if self.over else 'needs'} `over`")


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedCell:
    """A cell and where it stands: label by axis, and its seed."""

    cell: Cell
    labels: Mapping[str, str]
    seed: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Study:
    """name: of its page and files. about, explanation: Markdown; {name} stands for a claim's number.

    x: axis along which figures are plotted; empty: bars. series: axis whose points are told apart by colour; every
    other axis gets a plot for each of its points. plots: figures that are drawn.
    requests: only the first so many of each workload; None: all.
    memory: set-ups of `experiment.memory` of which the page says whether they fit.
    """

    name: str
    title: str
    about: str
    axes: tuple[Axis, ...]
    scenario: Mapping[str, Any]
    seeds: tuple[int, ...]
    series: str
    x: str = ""
    order: int = 0
    paper: str = ""
    explanation: str = ""
    summary: str = ""
    kind: CellKind = "run"
    requests: int | None = None
    capacity: CapacitySearch | None = None
    plots: tuple[str, ...] = ("latency_p50_s", "latency_p95_s", "hit_rate")
    claims: tuple[Claim, ...] = ()
    memory: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        names = [axis.name for axis in self.axes]
        for role, name in (("series", self.series), ("x", self.x)):
            if name and name not in names:
                raise StudyError(f"{self.name}: {role} is {name!r}, which is no axis; axes: {', '.join(names)}")
        if not self.seeds or len(set(self.seeds)) != len(self.seeds):
            raise StudyError(f"{self.name}: seeds must be different numbers, got {list(self.seeds)}")
        for figure in self.plots:
            if figure not in FIGURES:
                raise StudyError(f"{self.name}: no figure {figure!r} to plot; known: {', '.join(FIGURES)}")
        for claim in self.claims:
            self._check(claim)
        one_of(get_args(CellKind), "kind", self.kind)
        for set_up in self.memory:
            one_of(tuple(SET_UPS), "memory", set_up)
        known = {claim.name for claim in self.claims}
        for text in (self.about, self.explanation, self.summary):
            unknown = sorted(places(text) - known)
            if unknown:
                raise StudyError(f"{unknown[0]!r} is the number of no claim; claims: {', '.join(known) or 'none'}")

    def _check(self, claim: Claim) -> None:
        for labels in (claim.of, claim.over):
            for name, label in labels.items():
                known = [point.label for point in self.axis(name).points]
                if label not in known:
                    raise StudyError(
                        f"{self.name}: claim {claim.name!r} names {name} {label!r}; known: {', '.join(known)}"
                    )

    def axis(self, name: str) -> Axis:
        """Raises: StudyError if there is none of that name."""
        for axis in self.axes:
            if axis.name == name:
                return axis
        raise StudyError(f"{self.name}: no axis {name!r}; axes: {', '.join(axis.name for axis in self.axes)}")

    def cells(self) -> Sequence[PlacedCell]:
        """Every combination of points, with every seed: the same arrivals and prompts for all of one seed."""
        placed = []
        for points in product(*(axis.points for axis in self.axes)):
            changes: dict[str, Any] = {}
            for point in points:
                changes.update(point.changes)
            kind = next((point.kind for point in points if point.kind is not None), self.kind)
            if self.requests is not None:
                changes["workload.requests"] = self.requests
            labels = {axis.name: point.label for axis, point in zip(self.axes, points, strict=True)}
            for seed in self.seeds:
                values = changed(self.scenario, {**changes, "seed": seed})
                cell = Cell(kind=kind, scenario=values, capacity=self.capacity if kind == "capacity" else None)
                placed.append(PlacedCell(cell=cell, labels=labels, seed=seed))
        return placed
