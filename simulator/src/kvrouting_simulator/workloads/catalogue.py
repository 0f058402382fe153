"""Workloads by name, from plain values: what scenario files and command lines say."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from kvrouting_simulator.workloads.arrivals import (
    Arrivals,
    GammaArrivals,
    PoissonArrivals,
    RecordedArrivals,
)
from kvrouting_simulator.workloads.calibration_load import CalibrationLoad
from kvrouting_simulator.workloads.gsp import Gsp
from kvrouting_simulator.workloads.long_documents import LongDocuments
from kvrouting_simulator.workloads.multi_turn import MultiTurn
from kvrouting_simulator.workloads.spec import WorkloadSpec
from kvrouting_simulator.workloads.trace_files import TraceError, open_trace, read_azure, read_mooncake
from kvrouting_simulator.workloads.traces import AgentSessions, AzureTrace, MooncakeTrace

_KINDS: Mapping[str, type[Any]] = MappingProxyType(
    {
        "gsp": Gsp,
        "multi_turn": MultiTurn,
        "long_documents": LongDocuments,
        "mooncake": MooncakeTrace,
        "agents": AgentSessions,
        "azure": AzureTrace,
        "calibration": CalibrationLoad,
    }
)
WORKLOAD_NAMES = tuple(_KINDS)
_HOW_TO_GIVE = {"path": "a trace: give its file with --trace, or as `path` of the workload in a scenario file"}


def build_workload(name: str, parameters: Mapping[str, object]) -> WorkloadSpec:
    """A workload of a kind with its numbers; what is not given has its default.

    parameters: names of the kind's fields. `arrivals` is a mapping: {"kind": "poisson", "rate_per_s": 12},
    {"kind": "gamma", "rate_per_s": 12, "cv": 3}, {"kind": "mooncake" or "azure", "path": ..., "speed": 1}.
    Raises: ValueError naming the unknown name or the value that does not fit.
    """
    kind = _KINDS.get(name)
    if kind is None:
        raise ValueError(f"unknown workload {name!r}; known: {', '.join(WORKLOAD_NAMES)}")
    known = typing.get_type_hints(kind)
    values: dict[str, Any] = {}
    for key, value in parameters.items():
        if key not in known:
            raise ValueError(f"workload {name!r} has no {key!r}; known: {', '.join(known)}")
        values[key] = build_arrivals(value) if key == "arrivals" else _converted(f"{name}.{key}", value, known[key])
    for field in dataclasses.fields(kind):
        if field.name not in values and field.default is field.default_factory is dataclasses.MISSING:
            raise ValueError(f"workload {name!r} needs {_HOW_TO_GIVE.get(field.name, repr(field.name))}")
    spec: WorkloadSpec = kind(**values)
    return spec


def trace_kind(path: Path) -> str:
    """The workload that a trace file is, by its first line that is not blank.

    Raises: TraceError if there is none or the file is no text; OSError if it cannot be opened.
    """
    with open_trace(path) as file:
        first = next((line for line in file if line.strip()), None)
    if first is None:
        raise TraceError(path, None, "the file is empty")
    if not first.lstrip().startswith("{"):
        return "azure"
    return "agents" if '"session"' in first else "mooncake"


def takes(name: str, parameter: str) -> bool:
    """Whether a kind of workload has such a number. Raises: KeyError for an unknown kind."""
    return parameter in {field.name for field in dataclasses.fields(_KINDS[name])}


def build_arrivals(value: object) -> Arrivals:
    """Arrivals from plain values, see `build_workload`. Raises: ValueError naming what does not fit."""
    if not isinstance(value, Mapping):
        raise ValueError(f"arrivals must be a mapping with a kind, got {value!r}")  # noqa: TRY004 - values come from users
    given = dict(value)
    kind = given.pop("kind", "poisson")
    allowed = {"poisson": ("rate_per_s",), "gamma": ("rate_per_s", "cv"), "mooncake": ("path", "speed")}
    allowed["azure"] = allowed["mooncake"]
    if kind not in allowed:
        raise ValueError(f"arrivals.kind must be one of {', '.join(allowed)}, got {kind!r}")
    for key in given:
        if key not in allowed[kind]:
            raise ValueError(f"arrivals of kind {kind!r} have no {key!r}; known: {', '.join(allowed[kind])}")
    path = given.pop("path", None)
    numbers = {key: _converted(f"arrivals.{key}", number, float) for key, number in given.items()}
    if kind == "poisson":
        return PoissonArrivals(**numbers)
    if kind == "gamma":
        return GammaArrivals(**numbers)
    if path is None:
        raise ValueError(f"arrivals of kind {kind!r} need a path")
    rows = read_mooncake(Path(str(path))) if kind == "mooncake" else read_azure(Path(str(path)))
    return RecordedArrivals(recorded_ms=[row.timestamp_ms for row in rows], **numbers)


def _converted(name: str, value: object, hint: Any) -> Any:
    """A plain value, or its spelling as text, as a field's type. Raises: ValueError naming the field and the value."""
    if hint is Path:
        return Path(str(value))
    if isinstance(value, str) and typing.get_origin(hint) is tuple:
        value = value.split(",")
    try:
        return msgspec.convert(value, hint, strict=not isinstance(value, (str, list)))
    except msgspec.ValidationError as error:
        raise ValueError(f"{name} is {value!r}: {error}") from None
