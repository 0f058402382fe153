"""Studies from TOML files; docs/experiments.md describes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import msgspec

from kvrouting_core.prefix_index import PrefixIndex
from kvrouting_simulator.experiment import build_scenario, read_values
from kvrouting_simulator.experiment.simulation import policy_of
from kvrouting_simulator.study.cell import CapacitySearch, CellKind
from kvrouting_simulator.study.definition import Axis, Claim, Point, Study, StudyError
from kvrouting_simulator.study.execution import data_file
from kvrouting_simulator.study.paths import merged

_PLAIN = ("title", "about", "paper", "explanation", "summary", "order", "series", "x", "kind", "requests")
_TOP = (*_PLAIN, "base", "scenario", "seeds", "plots", "memory", "axes", "claims", "capacity", "quick")
_AXIS = ("name", "unit", "path", "values", "points", "from", "pick")
_POINT = ("label", "set", "kind")
_QUICK = ("seeds", "scenario", "keep", "capacity", "requests")


def read_studies(folder: Path, *, quick: bool = False, names: Sequence[str] = ()) -> list[Study]:
    """The studies of a folder (`*.toml` but those whose names begin with `_`), in their order.

    quick: the small form; studies without one are left out. names: only these.
    Raises: StudyError naming file and value.
    """
    paths = {path.stem: path for path in sorted(folder.glob("*.toml")) if not path.stem.startswith("_")}
    for name in names:
        if name not in paths:
            raise StudyError(f"no study {name!r} in {folder}; there are: {', '.join(paths) or 'none'}")
    studies = [read_study(path, quick=quick) for name, path in paths.items() if not names or name in names]
    return sorted((study for study in studies if study is not None), key=lambda study: (study.order, study.name))


def read_study(path: Path, *, quick: bool = False) -> Study | None:
    """One study; None if its small form is wanted and it has none. Raises: StudyError naming file and value."""
    try:
        values = read_values(path)
        _known(values, _TOP, "study")
        if quick and "quick" not in values:
            return None
        study = _study(path, _small(values) if quick else values)
        _check_scenarios(study)
    except (ValueError, TypeError, KeyError) as error:
        raise StudyError(f"{path.name}: {_reason(error)}") from error
    return study


def _reason(error: Exception) -> str:
    return f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)


def _small(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values with what `quick` changes in them; it has numbers alone, so no texts and no claims."""
    quick = _table(values["quick"], "quick")
    _known(quick, _QUICK, "quick")
    small = {**values, "scenario": merged(values.get("scenario", {}), quick.get("scenario", {}))}
    small.update({name: quick[name] for name in ("seeds", "capacity", "requests") if name in quick})
    keep = _table(quick.get("keep", {}), "quick.keep")
    _known(keep, [axis.get("name") for axis in values["axes"]], "quick.keep")
    small["axes"] = [{**axis, "pick": keep.get(axis["name"], axis.get("pick"))} for axis in values["axes"]]
    return {**small, "claims": [], "about": "", "explanation": "", "summary": ""}


def _study(path: Path, values: Mapping[str, Any]) -> Study:
    scenario: dict[str, Any] = {}
    for name in values.get("base", []):
        scenario = merged(scenario, read_values(path.parent / name))
    scenario = merged(scenario, values.get("scenario", {}))
    capacity = values.get("capacity")
    plain: dict[str, Any] = {name: values[name] for name in _PLAIN if name in values}
    plain.update({name: tuple(values[name]) for name in ("plots", "memory") if name in values})
    return Study(
        name=path.stem,
        scenario=scenario,
        seeds=_converted(values["seeds"], tuple[int, ...], "seeds"),
        axes=tuple(_axis(_table(axis, "axes"), path.parent) for axis in values["axes"]),
        claims=tuple(_claim(_table(claim, "claims")) for claim in values.get("claims", [])),
        capacity=None if capacity is None else _converted(capacity, CapacitySearch, "capacity"),
        **plain,
    )


def _axis(values: Mapping[str, Any], folder: Path) -> Axis:
    """Points written out, or values of one path, or those of another file."""
    _known(values, _AXIS, "axis")
    name = values["name"]
    if "values" in values:
        points = [_value_point(values["path"], value) for value in values["values"]]
    elif "from" in values:
        points = [_point(point) for point in read_values(folder / values["from"])["points"]]
    else:
        points = [_point(point) for point in values["points"]]
    pick = values.get("pick")
    if pick is not None:
        by_label = {point.label: point for point in points}
        _known({str(label): None for label in pick}, list(by_label), f"axis {name!r}")
        points = [by_label[str(label)] for label in pick]
    return Axis(name=name, unit=values.get("unit", ""), points=tuple(points))


def _value_point(path: str, value: object) -> Point:
    number = float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
    return Point(label=str(value), changes={path: value}, number=number)


def _point(values: object) -> Point:
    given = _table(values, "points")
    _known(given, _POINT, "point")
    kind = given.get("kind")
    if kind is not None and kind not in get_args(CellKind):
        raise StudyError(f"kind must be one of {', '.join(get_args(CellKind))}, got {kind!r}")
    return Point(label=given["label"], changes=_table(given.get("set", {}), "set"), kind=kind)


def _claim(values: Mapping[str, Any]) -> Claim:
    _known(values, [field.name for field in fields(Claim)], "claim")
    claim: Claim = _converted(values, Claim, f"claim {values.get('name')!r}")
    return claim


def _check_scenarios(study: Study) -> None:
    """Builds each cell's scenario and policy: a wrong value shows before hours of runs. Trace files may be absent."""
    for placed in study.cells():
        values = placed.cell.scenario
        if data_file(values) is None:
            try:
                policy_of(build_scenario(values), PrefixIndex())
            except ValueError as error:
                raise StudyError(f"at {dict(placed.labels)}: {error}") from error


def _converted(value: object, kind: Any, where: str) -> Any:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise StudyError(f"{where}: {error}") from error


def _table(value: object, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise StudyError(f"{where} must hold tables, got {value!r}")
    return value


def _known(given: Mapping[str, Any], known: Sequence[Any], where: str) -> None:
    for name in given:
        if name not in known:
            raise StudyError(f"{where} has no {name!r}; known: {', '.join(map(str, known))}")
