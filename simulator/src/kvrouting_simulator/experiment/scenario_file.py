"""Scenarios as plain values: TOML and JSON files, and what a command line changes in them.

policy = "lbgr"
seed = 1
[policy_parameters]
price = 2
[workload]
kind = "gsp"                      # see `workloads.catalogue` for kinds and their numbers
order = "random"
arrivals = { kind = "poisson", rate_per_s = 12 }
[[workers]]
count = 4
worker_class = "L40"
eviction = "rlt-adaptive"
memory_fraction = 0.7             # or capacity_tokens
scheduler = { mixed_chunk = true }
[delays]
report_on_change = true
[[failures]]
worker = 0
killed_ms = 60000
back_ms = 90000
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import tomllib

from kvrouting_core.routing.policy import AdmissionLimits
from kvrouting_simulator.experiment.memory import capacity_at
from kvrouting_simulator.experiment.scenario import Delays, Failure, Scenario, WorkerSpec
from kvrouting_simulator.workloads import build_workload

_Section = TypeVar("_Section")
_SECTIONS = ("workload", "workers", "delays", "limits", "failures", "policy_parameters")
_PLAIN = (
    "name",
    "policy",
    "routers",
    "block_tokens",
    "seed",
    "tie_seed",
    "max_attempts",
    "resubmissions",
    "goodput_ttft_ms",
)


class ScenarioError(ValueError):
    """A scenario that cannot be run; the message names the value."""


def read_values(path: Path) -> dict[str, Any]:
    """The values of a .toml or .json file. Raises: ScenarioError naming the file and what is wrong with it."""
    try:
        if path.suffix == ".toml":
            return tomllib.loads(path.read_text(encoding="utf-8"))
        if path.suffix == ".json":
            values = json.loads(path.read_text(encoding="utf-8"))
            if isinstance(values, dict):
                return values
            raise ScenarioError(f"{path} holds no object")
    except (OSError, ValueError) as error:
        raise ScenarioError(f"{path} cannot be read: {error}") from error
    raise ScenarioError(f"{path} is neither .toml nor .json")


def build_scenario(values: Mapping[str, Any]) -> Scenario:
    """A scenario from the values of a file. Raises: ScenarioError naming the value."""
    _check_names(values, (*_PLAIN, *_SECTIONS), "scenario")
    workload = dict(_mapping(values.get("workload", {}), "workload"))
    try:
        return Scenario(
            workload=build_workload(str(workload.pop("kind", "gsp")), workload),
            workers=_workers(values.get("workers", [{"count": 4}])),
            policy_parameters=_mapping(values.get("policy_parameters", {}), "policy_parameters"),
            delays=_section(Delays, values.get("delays", {}), "delays"),
            limits=_section(AdmissionLimits, values.get("limits", {}), "limits"),
            failures=tuple(
                _section(Failure, failure, "failures") for failure in _list(values.get("failures", []), "failures")
            ),
            settings=_flat(values),
            **{name: values[name] for name in _PLAIN if name in values},
        )
    except ScenarioError:
        raise
    except (ValueError, TypeError) as error:
        raise ScenarioError(str(error)) from error


def _workers(value: object) -> tuple[WorkerSpec, ...]:
    workers: list[WorkerSpec] = []
    for entry in _list(value, "workers"):
        given = dict(_mapping(entry, "workers"))
        count = given.pop("count", 1)
        if "memory_fraction" in given:
            given["capacity_tokens"] = _capacity(given)
        if type(count) is not int or count < 1:
            raise ScenarioError(f"workers.count must be a whole number of at least 1, got {count!r}")
        workers += [_section(WorkerSpec, given, "workers")] * count
    return tuple(workers)


def _capacity(given: dict[str, Any]) -> int:
    fraction = given.pop("memory_fraction")
    if "capacity_tokens" in given:
        raise ScenarioError(f"workers take capacity_tokens or memory_fraction, not both: got {fraction!r} too")
    if type(fraction) is not float:
        raise ScenarioError(f"workers.memory_fraction must be a number between 0 and 1, got {fraction!r}")
    try:
        return capacity_at(str(given.get("worker_class", "L40")), fraction)
    except ValueError as error:
        raise ScenarioError(f"workers.{error}") from error


def _section(kind: type[_Section], value: object, where: str) -> _Section:
    given = _mapping(value, where)
    _check_names(given, [field.name for field in fields(kind)], where)  # type: ignore[arg-type]
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise ScenarioError(f"{where}: {error}") from error


def _check_names(given: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    for name in given:
        if name not in known:
            raise ScenarioError(f"{where} has no {name!r}; known: {', '.join(known)}")


def _mapping(value: object, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ScenarioError(f"{where} must be a table, got {value!r}")
    return value


def _list(value: object, where: str) -> Sequence[object]:
    if not isinstance(value, list):
        raise ScenarioError(f"{where} must be a list of tables, got {value!r}")
    return value


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, str | int | float | bool | None]:
    """Nested values under dotted names; lists as JSON text."""
    flat: dict[str, str | int | float | bool | None] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat.update(_flat(value, f"{prefix}{name}."))
        elif value is None or isinstance(value, (str, int, float, bool)):
            flat[prefix + name] = value
        else:
            flat[prefix + name] = json.dumps(value, default=str)
    return flat
