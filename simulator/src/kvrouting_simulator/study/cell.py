"""One run of a study: a scenario as plain values, how it is run, and the digest under which its result is kept."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from kvrouting_simulator.bounds import at_least, one_of, positive

RESULT_FORMAT = "kvrouting-cell/1"
"""Raised when results of the same scenario are no longer comparable: a change of the figures or of the simulation."""

CellKind = Literal["run", "timed", "optimum", "capacity"]
Figures = Mapping[str, float | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class CapacitySearch:
    """The highest rate of the grid low, low + step ... high at which P95 of the latency is at most the target."""

    low_per_s: float
    high_per_s: float
    step_per_s: float = 0.25
    target_p95_s: float = 5.0

    def __post_init__(self) -> None:
        positive("capacity.low_per_s", self.low_per_s)
        at_least(self.low_per_s, "capacity.high_per_s", self.high_per_s)
        positive("capacity.step_per_s", self.step_per_s)
        positive("capacity.target_p95_s", self.target_p95_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """scenario: as `build_scenario` takes it; the path of a workload may begin with `data:`, a file of the data folder.

    kind: `run`; `timed`: with the time that decisions and evictions took; `optimum`: the same placement with caches
    that know the future; `capacity`: a search over the rate.
    """

    kind: CellKind
    scenario: Mapping[str, Any]
    capacity: CapacitySearch | None = None
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        one_of(get_args(CellKind), "kind", self.kind)
        if (self.kind == "capacity") != (self.capacity is not None):
            raise ValueError(f"kind {self.kind!r}: a capacity search and its bounds go together")
        object.__setattr__(self, "digest", self._digest())

    def _digest(self) -> str:
        search = self.capacity
        content: dict[str, Any] = {"format": RESULT_FORMAT, "kind": self.kind, "scenario": self.scenario}
        if search is not None:
            content["capacity"] = [search.low_per_s, search.high_per_s, search.step_per_s, search.target_p95_s]
        text = json.dumps(content, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:24]


@dataclass(frozen=True, kw_only=True, slots=True)
class CellResult:
    """figures: by name, see `figures`. measured: those that differ from run to run, as times of this machine."""

    digest: str
    figures: dict[str, float | None]
    measured: dict[str, float] = field(default_factory=dict)
    format: str = RESULT_FORMAT
