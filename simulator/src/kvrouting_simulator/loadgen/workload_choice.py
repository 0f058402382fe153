"""A workload or a trace from what stands on a command line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from kvrouting_simulator.workloads import Client, MultiTurn, PoissonArrivals, ScheduledClient, Workload, WorkloadSpec
from kvrouting_simulator.workloads.catalogue import build_workload, takes, trace_kind


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """What is to be sent.

    workload: None: GSP, or the trace's own kind. trace: a file that takes the place of a generator.
    settings: the other numbers of the workload or trace by name.
    rate_per_s: Poisson arrivals, of a trace of sessions: of their starts; None: the workload's own rate, or a trace's
        times. speed: of a trace's times. requests: at most so many; None: all.
    """

    workload: str | None = None
    trace: Path | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    rate_per_s: float | None = None
    speed: float | None = None
    requests: int | None = None
    seed: int = 1

    @property
    def name(self) -> str:
        """Of the workload or the trace's file."""
        return (self.workload or "gsp") if self.trace is None else self.trace.name


@runtime_checkable
class _Planned(Protocol):
    """A workload whose requests are all known beforehand."""

    def workload(self, *, seed: int) -> Workload:
        """The requests of one run."""


def build_spec(traffic: Traffic) -> WorkloadSpec:
    """The workload or trace with its numbers.

    Raises: ValueError naming what is unknown or has no sense, and what there is; OSError for an unreadable trace.
    """
    kind = traffic.workload or ("gsp" if traffic.trace is None else trace_kind(traffic.trace))
    given: dict[str, Any] = {"path": traffic.trace, "speed": traffic.speed, "requests": traffic.requests}
    if traffic.rate_per_s is not None:
        if not takes(kind, "arrivals"):
            raise ValueError(f"{traffic.name} has recorded times: a rate has no meaning for it, set its speed")
        given["arrivals"] = {"kind": "poisson", "rate_per_s": traffic.rate_per_s}
    values = {name: value for name, value in given.items() if value is not None}
    return build_workload(kind, {**values, **traffic.settings})


def build_client(spec: WorkloadSpec, *, seed: int) -> tuple[Client, int | None]:
    """Who sends it, and how many requests that will be; None if it is not known beforehand."""
    if isinstance(spec, MultiTurn) and spec.loop == "paper":
        return spec.client(seed=seed), spec.requests
    if isinstance(spec, _Planned):
        workload = spec.workload(seed=seed)
        return ScheduledClient(workload), len(workload)
    return spec.client(seed=seed), None


def described(spec: WorkloadSpec, *, seed: int) -> dict[str, str | int | float | bool | None]:
    """For the settings of a report: every number of the spec."""
    shown: dict[str, str | int | float | bool | None] = {"workload": type(spec).__name__, "seed": seed}
    if not is_dataclass(spec):
        return shown
    for f in fields(spec):
        value = getattr(spec, f.name)
        if isinstance(value, PoissonArrivals):
            shown["rate (requests/s)"] = value.rate_per_s
        elif isinstance(value, (str, int, float)):
            shown[f.name] = value
        elif isinstance(value, tuple):
            shown[f.name] = ", ".join(map(str, value))
        elif value is not None:
            shown[f.name] = value.name if isinstance(value, Path) else str(value)
    return shown
