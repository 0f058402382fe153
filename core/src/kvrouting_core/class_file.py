"""The text of a worker class that was measured: what `kvrouting calibrate` writes and router and engine take."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from kvrouting_core.service_time import StepTimes

KIND = "kvrouting worker class"
COEFFICIENTS = tuple(f.name for f in fields(StepTimes))
_LONGEST_NAME = 63
_KEYS = frozenset({"kind", "name", "coefficients", "standard_errors", "measured"})


class ClassFileError(ValueError):
    """A text that is no worker class; the message names what is wrong in it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredClass:
    """A worker class by its own name: its step times, and how they were come by.

    standard_errors: of coefficients, by their names, in the coefficient's unit; one that was set, not measured, has
    none. measured: what they rest on, for people; nothing is computed from it.
    """

    name: str
    times: StepTimes
    standard_errors: Mapping[str, float] = field(default_factory=dict)
    measured: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.name or len(self.name) > _LONGEST_NAME or not self.name.isprintable():
            raise ClassFileError(f"name is {self.name!r}: give 1 to {_LONGEST_NAME} printable characters")

    def as_text(self) -> str:
        """Its file, one line for each value."""
        body = {
            "kind": KIND,
            "name": self.name,
            "coefficients": {name: getattr(self.times, name) for name in COEFFICIENTS},
            "standard_errors": dict(self.standard_errors),
            "measured": dict(self.measured),
        }
        return json.dumps(body, indent=1) + "\n"


def parse_class(text: str) -> MeasuredClass:
    """The class of a file's text. Raises: ClassFileError naming what is missing, unknown or wrong."""
    try:
        body = json.loads(text)
    except ValueError as error:
        raise ClassFileError(f"is no JSON ({error})") from None
    if not isinstance(body, dict) or body.get("kind") != KIND:
        raise ClassFileError(f'is no worker class: it must be an object with "kind": "{KIND}"')
    unknown = body.keys() - _KEYS
    if unknown:
        raise ClassFileError(f"has unknown keys: {', '.join(sorted(map(str, unknown)))}")
    name, measured = body.get("name"), body.get("measured", {})
    if not isinstance(name, str):
        raise ClassFileError(f"name is {name!r}, not a text")
    if not isinstance(measured, dict):
        raise ClassFileError(f"measured is {measured!r}, not an object")
    coefficients = _numbers(body.get("coefficients"), "coefficients")
    missing = [each for each in COEFFICIENTS if each not in coefficients]
    if missing:
        raise ClassFileError(f"coefficients lack {', '.join(missing)}")
    try:
        times = StepTimes(**coefficients)
    except ValueError as error:
        raise ClassFileError(str(error)) from None
    errors = _numbers(body.get("standard_errors", {}), "standard_errors")
    return MeasuredClass(name=name, times=times, standard_errors=errors, measured=measured)


def _numbers(values: object, what: str) -> dict[str, float]:
    if not isinstance(values, dict):
        raise ClassFileError(f"{what} is {values!r}, not an object")
    for name, value in values.items():
        if name not in COEFFICIENTS:
            raise ClassFileError(f"{what} has the unknown {name!r}; known: {', '.join(COEFFICIENTS)}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ClassFileError(f"{name} in {what} is {value!r}, not a finite number")
    return {name: float(value) for name, value in values.items()}
