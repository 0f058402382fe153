"""The workers: one pod is an engine and its sidecar."""

from __future__ import annotations

import msgspec

from kvrouting_operator.pod_override import apply_override
from kvrouting_operator.pool import Images, Object, PoolIdentity, PoolKeys
from kvrouting_operator.resources.engine_container import engine_container, engine_volumes, plugin_container
from kvrouting_operator.resources.names import (
    KEYS_ANNOTATION,
    WORKER,
    component_labels,
    selector_labels,
    worker_name,
)
from kvrouting_operator.resources.owned import owned
from kvrouting_operator.resources.pod_parts import pod_security
from kvrouting_operator.resources.sidecar_container import drain_hook, sidecar_container, sidecar_volumes
from kvrouting_operator.resources.worker_inputs import WorkerInputs
from kvrouting_operator.spec import PoolSpec
from kvrouting_operator.spec.part import without_absent

# After the drain: for the engine to end, and then for the sidecar.
_ENDING_S = 60
# A ready worker is known to every router within this time; only then the next one is replaced.
_MIN_READY_S = 3


def worker_template(inputs: WorkerInputs, keys: PoolKeys, images: Images, *, native_sidecar: bool) -> Object:
    """The pod template. Raises: InvalidSpecError if podTemplate changes what would break the pool."""
    pre_stop = drain_hook(keys.drain_token)
    sidecar = sidecar_container(inputs, images, native=native_sidecar, pre_stop=pre_stop)
    plugin = plugin_container(inputs, images)
    engine = engine_container(inputs, images, pre_stop)
    spec: Object = {
        "serviceAccountName": worker_name(inputs.pool),
        "automountServiceAccountToken": False,
        # Variables of a Service named like one of our processes would be taken for its options.
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": inputs.drain.timeout_seconds + _ENDING_S,
        "securityContext": pod_security(),
        "initContainers": [*([plugin] if plugin else []), *([sidecar] if native_sidecar else [])],
        "containers": [engine, *([] if native_sidecar else [sidecar])],
        "volumes": [*sidecar_volumes(inputs), *engine_volumes(inputs)],
        **_scheduling(inputs),
    }
    metadata: Object = {
        "labels": component_labels(inputs.pool, WORKER),
        "annotations": {KEYS_ANNOTATION: inputs.keys, "kubectl.kubernetes.io/default-container": "engine"},
    }
    return apply_override({"metadata": metadata, "spec": spec}, inputs.pod_template, field="podTemplate")


def _scheduling(inputs: WorkerInputs) -> Object:
    gpu = inputs.gpu
    spec: Object = {}
    if gpu.selected_nodes:
        spec["nodeSelector"] = gpu.selected_nodes
    if gpu.tolerated:
        spec["tolerations"] = [without_absent(msgspec.to_builtins(t)) for t in gpu.tolerated]
    if gpu.runtime_class_name:
        spec["runtimeClassName"] = gpu.runtime_class_name
    return spec


def worker_deployment(pool: PoolIdentity, spec: PoolSpec, template: Object, annotations: dict[str, str]) -> Object:
    """The Deployment. A GPU more than replicas is never needed unless maxSurge says so."""
    return owned(
        pool,
        api_version="apps/v1",
        kind="Deployment",
        name=worker_name(pool.name),
        labels=component_labels(pool.name, WORKER),
        annotations=annotations,
        spec={
            "replicas": spec.replicas,
            "selector": {"matchLabels": selector_labels(pool.name, WORKER)},
            "minReadySeconds": _MIN_READY_S,
            # The pool's own condition tells what is missing; the Deployment's deadline covers the longest start.
            "progressDeadlineSeconds": spec.engine.startup_seconds + spec.drain.timeout_seconds + 2 * _ENDING_S,
            "strategy": {
                "type": "RollingUpdate",
                "rollingUpdate": {"maxSurge": spec.rollout.max_surge, "maxUnavailable": spec.rollout.max_unavailable},
            },
            "template": template,
        },
    )
