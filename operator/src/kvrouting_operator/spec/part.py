"""What every part of the spec is made of: a struct with bounds and descriptions on its fields, and rules between
them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, TypeAlias

import msgspec
from msgspec import Meta


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """A rule between fields, checked by the API server.

    cel: expression over `self` (and `oldSelf` for what may not change). message: what is wrong and what to do.
    message_expression: a CEL expression for a message that names the value; empty: `message` alone.
    """

    cel: str
    message: str
    message_expression: str = ""


class Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """Base of all parts. Fields are camelCase outside. A field whose type allows None is optional and has no
    default.
    """

    RULES: ClassVar[tuple[Rule, ...]] = ()


# Patterns are anchored here: in JSON schema they are not by themselves.
QUANTITY_PATTERN = r"^([0-9]+|[0-9]*\.[0-9]+)(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei|e[0-9]+)?$"
NAME_PATTERN = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"

INT_OR_STRING = {"x-kubernetes-int-or-string": True}
Quantity: TypeAlias = Annotated[int | str, Meta(extra_json_schema={**INT_OR_STRING, "pattern": QUANTITY_PATTERN})]
ObjectName: TypeAlias = Annotated[str, Meta(pattern=NAME_PATTERN, max_length=253)]
NamespaceName: TypeAlias = Annotated[str, Meta(pattern="^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=63)]
Image: TypeAlias = Annotated[str, Meta(min_length=1, max_length=512)]
Argument: TypeAlias = Annotated[str, Meta(min_length=1, max_length=1024)]
Path: TypeAlias = Annotated[str, Meta(pattern="^/.*", max_length=1024)]


def flag_name(argument: str) -> str:
    """The flag of `--flag=value` or `--flag`; a value alone comes back as it is."""
    return argument.split("=", 1)[0]


def owned_flags_rule(field: str, flags: Mapping[str, str], *, condition: str = "true") -> Rule:
    """Refuses arguments that the pool sets itself. flags: flag → the field to set instead, or why there is none.

    condition: CEL that must hold for the rule to matter.
    """
    names = "[" + ", ".join(f"'{flag}'" for flag in flags) + "]"
    owned = f"self.{field}.filter(a, a.split('=')[0] in {names})"
    return Rule(
        cel=f"!({condition}) || {owned}.size() == 0",
        message=f"{field} sets a flag that the pool sets itself",
        message_expression=f"'{field} sets ' + {owned}[0] + ', which the pool sets itself'",
    )


def refuse_owned_flags(field: str, arguments: tuple[str, ...], flags: Mapping[str, str]) -> None:
    """Raises: ValueError naming the first argument that the pool sets itself and what to set instead."""
    for argument in arguments:
        if flag_name(argument) in flags:
            raise ValueError(f"{field} sets {argument}, which the pool sets itself: {flags[flag_name(argument)]}")


def default_of(field: Any) -> Any:
    """The default of a msgspec field (of `msgspec.structs.fields`); NODEFAULT where it has none."""
    if field.default_factory is not msgspec.NODEFAULT:
        return field.default_factory()
    return field.default


def without_defaults(value: object) -> Any:
    """The value as plain data, without every field that holds its default.

    So a field that a later version adds does not change what an older spec looks like.
    """
    if isinstance(value, Part):
        plain = {}
        for field in msgspec.structs.fields(value):
            held = getattr(value, field.name)
            if held != default_of(field):
                plain[field.encode_name] = without_defaults(held)
        return plain
    if isinstance(value, tuple | list):
        return [without_defaults(item) for item in value]
    if isinstance(value, Mapping):
        return {key: without_defaults(item) for key, item in value.items()}
    return value


def without_absent(value: object) -> object:
    """Plain data without the entries that are None."""
    if isinstance(value, Mapping):
        return {key: without_absent(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [without_absent(item) for item in value]
    return value
