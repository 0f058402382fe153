"""Changing nested plain values by dotted names: `workers.eviction` is that of every entry of `workers`."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any


def changed(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A copy with each change in its place. Raises: ValueError naming a path that leads into something plain."""
    result = copy.deepcopy(dict(values))
    for path, value in changes.items():
        _set(result, path.split("."), copy.deepcopy(value), path)
    return result


def merged(values: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """A copy in which tables of `over` are merged into those of the same name; all else is replaced."""
    result = copy.deepcopy(dict(values))
    for name, value in over.items():
        below = result.get(name)
        if isinstance(value, Mapping) and isinstance(below, Mapping):
            result[name] = merged(below, value)
        else:
            result[name] = copy.deepcopy(value)
    return result


def _set(node: Any, path: list[str], value: Any, whole: str) -> None:
    if isinstance(node, list):
        for entry in node:
            _set(entry, path, copy.deepcopy(value), whole)
        return
    if not isinstance(node, dict):
        raise ValueError(f"{whole} leads into {node!r}, which has no {path[0]!r}")  # noqa: TRY004 - values come from users
    if len(path) == 1:
        node[path[0]] = value
    else:
        _set(node.setdefault(path[0], {}), path[1:], value, whole)
