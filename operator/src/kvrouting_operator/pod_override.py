"""podTemplate: what a user may change of a pod, and what would break the pool."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kvrouting_operator.pool import InvalidSpecError, Object
from kvrouting_operator.resources.names import (
    COMPONENT_LABEL,
    ENGINE_CONTAINER,
    KEYS_ANNOTATION,
    PLUGIN_CONTAINER,
    POOL_LABEL,
    ROUTER_CONTAINER,
    SIDECAR_CONTAINER,
)
from kvrouting_operator.strategic_merge import MergeError, merged

# Field of a pod's spec → why it is refused.
_REFUSED_POD_FIELDS: Mapping[str, str] = {
    "hostNetwork": "pods of a pool share ports, and NetworkPolicies do not see the host's network",
    "hostPID": "a pool needs no other process of the node",
    "enableServiceLinks": "variables of Services would be taken for options of the pool's processes",
    "restartPolicy": "a Deployment restarts its containers always",
    "terminationGracePeriodSeconds": "set drain.timeoutSeconds",
    "activeDeadlineSeconds": "a worker has no end of its own",
    "nodeSelector": "set gpu.nodeSelector",
    "runtimeClassName": "set gpu.runtimeClassName",
}
_WORKER_ONLY = ("nodeSelector", "runtimeClassName")
# Field of one of our containers → why it is refused.
_REFUSED_CONTAINER_FIELDS: Mapping[str, str] = {
    "image": "set the image in the spec",
    "imagePullPolicy": "set imagePullPolicy in the spec",
    "command": "the pool starts its processes itself; set args in the spec",
    "args": "set args in the spec",
    "lifecycle": "its end waits for requests under way",
    "restartPolicy": "the sidecar runs beside the engine",
    "startupProbe": "set engine.startupSeconds",
    "readinessProbe": "the pool's readiness depends on it",
    "livenessProbe": "the pool's readiness depends on it",
    "resources": "set resources in the spec",
    "ports": "the pool's Services need them as they are",
}
_OUR_CONTAINERS = {ENGINE_CONTAINER, SIDECAR_CONTAINER, PLUGIN_CONTAINER, ROUTER_CONTAINER}
_OUR_METADATA = {"labels": {POOL_LABEL, COMPONENT_LABEL}, "annotations": {KEYS_ANNOTATION}}
_METADATA_FIELDS = {"labels", "annotations"}


def apply_override(template: Object, override: Mapping[str, Any] | None, *, field: str) -> Object:
    """The template with the override merged over it. field: its name in the spec, for messages.

    Raises: InvalidSpecError naming every place that would break the pool, or cannot be merged.
    """
    if not override:
        return template
    problems = [
        f"{field}.{where}: {why}" for where, why in _problems(template, override, is_worker=field == "podTemplate")
    ]
    if problems:
        raise InvalidSpecError("; ".join(problems))
    try:
        return merged(template, override)
    except MergeError as error:
        raise InvalidSpecError(f"{field}.{error}") from error


def _problems(template: Object, override: Mapping[str, Any], *, is_worker: bool) -> Iterator[tuple[str, str]]:
    for key, value in override.items():
        if key not in ("metadata", "spec"):
            yield key, "a pod template has metadata and spec"
        elif not isinstance(value, Mapping):
            yield key, "must be a map"
        elif key == "metadata":
            yield from _metadata_problems(value)
        else:
            yield from _pod_problems(template["spec"], value, is_worker=is_worker)


def _metadata_problems(metadata: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for key, value in metadata.items():
        if key not in _METADATA_FIELDS:
            yield f"metadata.{key}", "only labels and annotations can be given to a pod of a Deployment"
        elif not isinstance(value, Mapping):
            yield f"metadata.{key}", "must be a map"
        else:
            for name in _OUR_METADATA[key] & set(value):
                yield f"metadata.{key}[{name}]", "the pool finds its pods by it"


def _pod_problems(base: Object, spec: Mapping[str, Any], *, is_worker: bool) -> Iterator[tuple[str, str]]:
    for key, why in _REFUSED_POD_FIELDS.items():
        if key in spec and (is_worker or key not in _WORKER_ONLY):
            yield f"spec.{key}", why
    for kind in ("containers", "initContainers"):
        yield from _container_problems(base, kind, spec)
    ours = {volume["name"] for volume in base["volumes"]}
    for volume in _entries(spec, "volumes"):
        if volume.get("name") in ours:
            yield f"spec.volumes[{volume['name']}]", "a volume of the pool has this name"
    if any(key in spec and spec[key] is None for key in ("containers", "volumes", "initContainers")):
        yield "spec", "containers, initContainers and volumes of the pool cannot be removed"


def _container_problems(base: Object, kind: str, spec: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    ours = {container["name"]: container for container in base.get(kind, [])}
    for container in _entries(spec, kind):
        name = container.get("name")
        if name not in ours:
            if name in _OUR_CONTAINERS:
                yield f"spec.{kind}[{name}]", "this name belongs to a container of the pool"
            continue
        for key in container:
            if key in _REFUSED_CONTAINER_FIELDS:
                yield f"spec.{kind}[{name}].{key}", _REFUSED_CONTAINER_FIELDS[key]
        yield from _content_problems(f"spec.{kind}[{name}]", ours[name], container)


def _content_problems(where: str, ours: Object, container: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    mounts = {entry["mountPath"] for entry in ours.get("volumeMounts", [])}
    for entry in _entries(container, "volumeMounts"):
        if entry.get("mountPath") in mounts:
            yield f"{where}.volumeMounts[{entry['mountPath']}]", "the pool mounts a volume there"
    variables = {entry["name"] for entry in ours.get("env", [])}
    for entry in _entries(container, "env"):
        name = str(entry.get("name"))
        if name in variables or name.startswith("KVROUTING_"):
            yield f"{where}.env[{name}]", "the pool sets it; see env in the spec"
    for key in ("env", "volumeMounts"):
        if key in container and container[key] is None:
            yield f"{where}.{key}", "what the pool sets cannot be removed"


def _entries(holder: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    """The maps in a list; what is no map is left to the merge, which refuses it."""
    value = holder.get(key)
    return [entry for entry in value if isinstance(entry, Mapping)] if isinstance(value, list) else []
