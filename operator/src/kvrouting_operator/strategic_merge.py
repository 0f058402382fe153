"""Strategic merge of pod templates: maps merge, null removes, lists of named things merge by their name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Merge keys of the lists in a pod template, as Kubernetes' API defines them. Other lists are replaced.
_MERGE_KEYS: Mapping[str, str] = {
    "containers": "name",
    "initContainers": "name",
    "ephemeralContainers": "name",
    "volumes": "name",
    "imagePullSecrets": "name",
    "env": "name",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "ports": "containerPort",
    "hostAliases": "ip",
    "topologySpreadConstraints": "topologyKey",
    "resourceClaims": "name",
    "schedulingGates": "name",
}


class MergeError(ValueError):
    """A patch that cannot be merged; the message names the place."""


def merged(base: Mapping[str, Any], patch: Mapping[str, Any], *, path: str = "") -> dict[str, Any]:
    """A new map; neither argument is changed. Raises: MergeError naming the place and what was expected there."""
    result = dict(base)
    for key, value in patch.items():
        where = f"{path}.{key}" if path else key
        if value is None:
            result.pop(key, None)
        elif isinstance(value, Mapping):
            held = result.get(key, {})
            if not isinstance(held, Mapping):
                raise MergeError(f"{where} is no map")
            result[key] = merged(held, value, path=where)
        elif isinstance(value, list) and key in _MERGE_KEYS:
            result[key] = _merged_list(result.get(key, []), value, _MERGE_KEYS[key], path=where)
        else:
            result[key] = value
    return result


def _merged_list(base: list[Any], patch: list[Any], merge_key: str, *, path: str) -> list[Any]:
    """Entries of the base keep their place; new ones come after them."""
    result = list(base)
    places = {entry[merge_key]: place for place, entry in enumerate(result)}
    for entry in patch:
        if not isinstance(entry, Mapping) or merge_key not in entry:
            raise MergeError(f"{path}: each entry needs {merge_key}, got {entry!r}")
        name = entry[merge_key]
        if name in places:
            result[places[name]] = merged(result[places[name]], entry, path=f"{path}[{name}]")
        else:
            places[name] = len(result)
            result.append(dict(entry))
    return result
