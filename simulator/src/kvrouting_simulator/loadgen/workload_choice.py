"""A workload or a trace from what stands on a command line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_origin, get_type_hints

import msgspec

from kvrouting_simulator.workloads.arrivals import PoissonArrivals
from kvrouting_simulator.workloads.client import ScheduledClient
from kvrouting_simulator.workloads.gsp import Gsp
from kvrouting_simulator.workloads.long_documents import LongDocuments
from kvrouting_simulator.workloads.multi_turn import MultiTurn
from kvrouting_simulator.workloads.trace_files import open_text
from kvrouting_simulator.workloads.traces import AgentSessions, AzureTrace, MooncakeTrace
from kvrouting_simulator.workloads.work_item import Client

Spec = Gsp | MultiTurn | LongDocuments | MooncakeTrace | AgentSessions | AzureTrace

_WORKLOADS: Mapping[str, type[Gsp] | type[MultiTurn] | type[LongDocuments]] = {
    "gsp": Gsp,
    "multi_turn": MultiTurn,
    "long_documents": LongDocuments,
}
WORKLOAD_NAMES = tuple(_WORKLOADS)
# Given by options of their own.
_NOT_SETTINGS = ("arrivals", "path", "requests", "speed")


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """What is to be sent.

    trace: a file that takes the place of the workload. settings: the other numbers of the workload or trace by name.
    rate_per_s: Poisson arrivals, of a trace of sessions: of their starts; None: the workload's own rate, or a trace's
        times. speed: of a trace's times. requests: at most so many; None: all.
    """

    workload: str = "gsp"
    trace: Path | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    rate_per_s: float | None = None
    speed: float = 1.0
    requests: int | None = None
    seed: int = 1

    def __post_init__(self) -> None:
        if self.trace is None and self.speed != 1.0:
            raise ValueError(f"speed {self.speed:g} is for a trace's recorded times: a workload has a rate")

    @property
    def name(self) -> str:
        """Of the workload or the trace's file."""
        return self.workload if self.trace is None else self.trace.name


def build_spec(traffic: Traffic) -> Spec:
    """The workload or trace with its numbers.

    Raises: ValueError naming what is unknown or has no sense, and what there is; OSError for an unreadable trace.
    """
    if traffic.trace is not None:
        return _trace_spec(traffic.trace, traffic)
    if traffic.workload not in _WORKLOADS:
        raise ValueError(f"unknown workload {traffic.workload!r}; known: {', '.join(WORKLOAD_NAMES)}")
    kind = _WORKLOADS[traffic.workload]
    values = _values(kind, traffic)
    if traffic.rate_per_s is not None:
        values["arrivals"] = PoissonArrivals(rate_per_s=traffic.rate_per_s)
    return kind(requests=traffic.requests, **values)


def build_client(spec: Spec, *, seed: int) -> tuple[Client, int | None]:
    """Who sends it, and how many requests that will be; None if it is not known beforehand."""
    if isinstance(spec, MultiTurn) and spec.loop == "paper":
        return spec.client(seed=seed), spec.requests
    workload = spec.workload(seed=seed)
    return ScheduledClient(workload), len(workload)


def described(spec: Spec, *, seed: int) -> dict[str, str | int | float | bool | None]:
    """For the settings of a report: every number of the spec."""
    shown: dict[str, str | int | float | bool | None] = {"workload": type(spec).__name__, "seed": seed}
    for f in fields(spec):
        value = getattr(spec, f.name)
        if isinstance(value, PoissonArrivals):
            shown["rate (requests/s)"] = value.rate_per_s
        elif isinstance(value, tuple):
            shown[f.name] = ", ".join(map(str, value))
        elif value is not None:
            shown[f.name] = value.name if isinstance(value, Path) else value
    return shown


def _trace_spec(path: Path, traffic: Traffic) -> Spec:
    kind = _trace_kind(path)
    values = _values(kind, traffic)
    if kind is AgentSessions and traffic.rate_per_s is not None:
        values["arrivals"] = PoissonArrivals(rate_per_s=traffic.rate_per_s)
    elif traffic.rate_per_s is not None:
        raise ValueError(f"{path} has recorded times: a rate has no meaning for it, set its speed")
    return kind(path=path, requests=traffic.requests, speed=traffic.speed, **values)


def _trace_kind(path: Path) -> type[MooncakeTrace] | type[AgentSessions] | type[AzureTrace]:
    with open_text(path) as file:
        first = file.readline()
    if not first.lstrip().startswith("{"):
        return AzureTrace
    return AgentSessions if '"session"' in first else MooncakeTrace


def _values(kind: type[Spec], traffic: Traffic) -> dict[str, Any]:
    types = get_type_hints(kind)
    known = [f.name for f in fields(kind) if f.name not in _NOT_SETTINGS]
    values: dict[str, Any] = {}
    for name, text in traffic.settings.items():
        if name not in known:
            raise ValueError(f"{traffic.name} has no setting {name!r}; it has: {', '.join(known)}")
        values[name] = _converted(name, text, types[name])
    return values


def _converted(name: str, text: str, kind: Any) -> Any:
    value: object = text.split(",") if get_origin(kind) is tuple else text
    try:
        return msgspec.convert(value, kind, strict=False)
    except msgspec.ValidationError as error:
        raise ValueError(f"{name}={text!r}: {error}") from error
