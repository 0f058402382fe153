"""The sidecar's container, and how the engine's end waits for it."""

from __future__ import annotations

from kvrouting_operator.pool import Images, Object
from kvrouting_operator.resources.keys import DRAIN_TOKEN, HASH_KEY, JOIN_TOKEN
from kvrouting_operator.resources.names import (
    DRAIN_HEADER,
    ENGINE_PORT,
    GRPC_PORT,
    SIDECAR_CONTAINER,
    SIDECAR_PORT,
    STATE_PORT,
    keys_name,
    sync_name,
)
from kvrouting_operator.resources.pod_parts import (
    KEYS_PATH,
    KEYS_VOLUME,
    TLS_PATH,
    TLS_VOLUME,
    field_env,
    http_probe,
    image,
    mount,
    restricted_security,
    secret_volume,
)
from kvrouting_operator.resources.worker_inputs import WorkerInputs

_CA = "ca.crt"
_REQUESTS = {"requests": {"cpu": "50m", "memory": "256Mi"}}


def drain_hook(drain_token: str) -> Object:
    """The preStop hook: the sidecar answers when no router has a request under way on this worker.

    The token stands in the pod's template, since a header cannot be taken from a Secret. It allows nothing but to
    drain a worker of this pool, from a pod that the NetworkPolicy lets through. A command inside the engine's
    container could read it from a file, but would depend on what the engine's image has and on the container being
    able to run it.
    """
    header = {"name": DRAIN_HEADER, "value": drain_token}
    return {"httpGet": {"path": "/drain", "port": SIDECAR_PORT, "scheme": "HTTP", "httpHeaders": [header]}}


def sidecar_container(inputs: WorkerInputs, images: Images, *, native: bool, pre_stop: Object) -> Object:
    """The container. native: it is an init container that goes on running, which starts before the engine and ends
    after it; otherwise (Kubernetes before 1.29) it is an ordinary one, which holds its own end back in the same way.
    """
    sidecar = inputs.sidecar
    mounts = [mount(KEYS_VOLUME, KEYS_PATH)]
    if inputs.router_tls:
        mounts.append(mount(TLS_VOLUME, TLS_PATH))
    container: Object = {
        "name": SIDECAR_CONTAINER,
        **image(sidecar.image or images.sidecar, sidecar.image_pull_policy),
        "command": ["kvrouting", "sidecar"],
        "args": _arguments(inputs),
        "env": [field_env("POD_UID", "metadata.uid"), field_env("POD_IP", "status.podIP")],
        "ports": [{"name": "sidecar", "containerPort": SIDECAR_PORT, "protocol": "TCP"}],
        "volumeMounts": mounts,
        "resources": sidecar.resources.as_container() or _REQUESTS,
        "securityContext": restricted_security(),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        # The start waits for the process alone: a native sidecar that waited for the engine would never let it start.
        "startupProbe": http_probe("/healthz", SIDECAR_PORT, period_s=1, timeout_s=2, failures=120),
        "readinessProbe": http_probe("/readyz", SIDECAR_PORT, period_s=2, timeout_s=2, failures=3),
        "livenessProbe": http_probe("/healthz", SIDECAR_PORT, period_s=10, timeout_s=5, failures=6),
    }
    if native:
        return {**container, "restartPolicy": "Always"}
    return {**container, "lifecycle": {"preStop": pre_stop}}


def sidecar_volumes(inputs: WorkerInputs) -> list[Object]:
    """The volumes of the sidecar's container."""
    volumes = [secret_volume(KEYS_VOLUME, keys_name(inputs.pool), [HASH_KEY, JOIN_TOKEN, DRAIN_TOKEN])]
    if inputs.router_tls:
        volumes.append(secret_volume(TLS_VOLUME, inputs.router_tls, [_CA]))
    return volumes


def _arguments(inputs: WorkerInputs) -> list[str]:
    gpu_class = inputs.gpu.prior or ("" if inputs.gpu.class_ == "custom" else inputs.gpu.class_)
    return [
        f"--pool={inputs.pool}",
        "--pod-uid=$(POD_UID)",
        f"--engine-url=http://127.0.0.1:{ENGINE_PORT}",
        f"--advertise-endpoint=http://$(POD_IP):{ENGINE_PORT}",
        f"--router={sync_name(inputs.pool)}.{inputs.namespace}.svc:{GRPC_PORT}",
        f"--block-size={inputs.sidecar.block_size}",
        f"--hash-key-file={KEYS_PATH}/{HASH_KEY}",
        f"--join-token-file={KEYS_PATH}/{JOIN_TOKEN}",
        f"--drain-token-file={KEYS_PATH}/{DRAIN_TOKEN}",
        f"--drain-header={DRAIN_HEADER}",
        f"--drain-timeout={inputs.drain.timeout_seconds}",
        f"--state-endpoint=tcp://127.0.0.1:{STATE_PORT}",
        f"--require-eviction={inputs.engine.eviction.policy}",
        f"--http-port={SIDECAR_PORT}",
        *([f"--gpu-class={gpu_class}"] if gpu_class else []),
        *([f"--router-ca={TLS_PATH}/{_CA}"] if inputs.router_tls else []),
    ]
