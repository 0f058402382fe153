"""Which pod template a Deployment gets: the one that it has, unless what it was rendered from has changed.

So a new version of the operator, which may render the same spec differently, replaces no pod by itself.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

from kvrouting_operator.pool import Object
from kvrouting_operator.resources.names import INPUTS_ANNOTATION, TEMPLATE_ANNOTATION
from kvrouting_operator.resources.worker_inputs import RouterInputs, WorkerInputs
from kvrouting_operator.spec.part import without_defaults


def digest(value: object) -> str:
    """Of plain data, whatever the order of its maps."""
    return hashlib.sha256(canonical(value).encode()).hexdigest()[:32]


def canonical(value: object) -> str:
    """JSON with sorted keys and no spaces."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def inputs_digest(inputs: WorkerInputs | RouterInputs) -> str:
    """Fields at their default do not count, so a field that a later version adds changes nothing."""
    held = {f.name: without_defaults(getattr(inputs, f.name)) for f in dataclasses.fields(inputs)}
    return digest({name: value for name, value in held.items() if value not in (None, "", {}, [])})


def chosen_template(
    live: Mapping[str, Any] | None, inputs: WorkerInputs | RouterInputs, render: Callable[[], Object]
) -> tuple[Object, dict[str, str]]:
    """The template and the annotations that remember it. live: the Deployment as it is, None if there is none."""
    wanted = inputs_digest(inputs)
    annotations = live["metadata"].get("annotations", {}) if live is not None else {}
    template: Object
    if annotations.get(INPUTS_ANNOTATION) == wanted and TEMPLATE_ANNOTATION in annotations:
        template = json.loads(annotations[TEMPLATE_ANNOTATION])
    else:
        template = render()
    return template, {INPUTS_ANNOTATION: wanted, TEMPLATE_ANNOTATION: canonical(template)}


def is_outdated(live: Mapping[str, Any] | None, fresh: Object) -> bool:
    """Whether the present operator would render the kept template differently."""
    if live is None:
        return False
    kept = live["metadata"].get("annotations", {}).get(TEMPLATE_ANNOTATION)
    return kept is not None and kept != canonical(fresh)
