"""From the typed definition to Kubernetes' structural OpenAPI v3 schema."""

from __future__ import annotations

from typing import Any, cast

import msgspec
from msgspec import inspect

from kvrouting_operator.spec.part import Part, Rule, default_of, without_absent

Schema = dict[str, Any]

_INTEGER = {"type": "integer", "format": "int64"}


class UnsupportedTypeError(TypeError):
    """A field's type has no structural schema."""


def schema_of(part: type[Part]) -> Schema:
    """The schema of a part, every field with its description, default, bounds and rules.

    Raises: UnsupportedTypeError naming the type; ValueError naming a field without a description.
    """
    return _struct(part)


def _struct(part: type[Part]) -> Schema:
    properties, required = {}, []
    types = {field.name: field for field in cast(inspect.StructType, inspect.type_info(part)).fields}
    for field in msgspec.structs.fields(part):
        schema = _schema(types[field.name].type)
        if not schema.get("description"):
            raise ValueError(f"{part.__name__}.{field.name} has no description")
        default = default_of(field)
        if default is msgspec.NODEFAULT:
            required.append(field.encode_name)
        elif default is not None:
            schema["default"] = without_absent(msgspec.to_builtins(default))
        properties[field.encode_name] = schema
    result: Schema = {"description": (part.__doc__ or "").strip(), "type": "object", "properties": properties}
    if required:
        result["required"] = required
    if part.RULES:
        result["x-kubernetes-validations"] = [_rule(rule) for rule in part.RULES]
    return result


def _rule(rule: Rule) -> Schema:
    written = {"rule": rule.cel, "message": rule.message}
    if rule.message_expression:
        written["messageExpression"] = rule.message_expression
    return written


def _schema(kind: inspect.Type) -> Schema:
    if isinstance(kind, inspect.Metadata):
        inner = _schema(kind.type)
        extra = dict(kind.extra_json_schema or {})
        if extra.get("x-kubernetes-int-or-string"):
            inner = {"anyOf": [{"type": "integer"}, {"type": "string"}]}
        return {**inner, **extra}
    if isinstance(kind, inspect.UnionType):
        return _union(kind)
    if isinstance(kind, inspect.StructType):
        return _struct(cast(type[Part], kind.cls))
    if isinstance(kind, inspect.DictType):
        return _map(kind)
    if isinstance(kind, inspect.VarTupleType):
        return _list(kind)
    return _scalar(kind)


def _union(kind: inspect.UnionType) -> Schema:
    present = [option for option in kind.types if not isinstance(option, inspect.NoneType)]
    if len(present) == 1:
        return _schema(present[0])
    return {}  # int or string: the metadata around it says so


def _map(kind: inspect.DictType) -> Schema:
    if isinstance(kind.value_type, inspect.AnyType):
        return {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    schema: Schema = {"type": "object", "additionalProperties": _schema(kind.value_type)}
    if kind.max_length is not None:
        schema["maxProperties"] = kind.max_length
    return schema


def _list(kind: inspect.VarTupleType) -> Schema:
    schema: Schema = {"type": "array", "items": _schema(kind.item_type)}
    if kind.max_length is not None:
        schema["maxItems"] = kind.max_length
    return schema


def _scalar(kind: inspect.Type) -> Schema:
    if isinstance(kind, inspect.BoolType):
        return {"type": "boolean"}
    if isinstance(kind, inspect.LiteralType):
        return {"type": "string", "enum": list(kind.values)}
    if isinstance(kind, inspect.IntType):
        return {**_INTEGER, **_bounds(kind)}
    if isinstance(kind, inspect.FloatType):
        return {"type": "number", **_bounds(kind)}
    if isinstance(kind, inspect.StrType):
        limits = {"minLength": kind.min_length, "maxLength": kind.max_length, "pattern": kind.pattern}
        return {"type": "string", **{key: value for key, value in limits.items() if value is not None}}
    raise UnsupportedTypeError(f"no structural schema for {kind}")


def _bounds(kind: inspect.IntType | inspect.FloatType) -> Schema:
    bounds = {"minimum": kind.ge, "maximum": kind.le}
    return {key: value for key, value in bounds.items() if value is not None}
