"""The engine's container: SGLang with the plug-in, or the simulated engine."""

from __future__ import annotations

import json
import math

from kvrouting_operator.pool import Images, Object
from kvrouting_operator.resources.model_files import ModelFiles, model_files, tokenizer_files
from kvrouting_operator.resources.names import (
    ENGINE_CONTAINER,
    ENGINE_PORT,
    EVENTS_PORT,
    LOAD_PORT,
    PLUGIN_CONTAINER,
    REPLAY_PORT,
    STATE_PORT,
)
from kvrouting_operator.resources.pod_parts import (
    claim_volume,
    empty_volume,
    http_probe,
    image,
    mount,
    plain_env,
    restricted_security,
    spec_env,
    unprivileged_security,
)
from kvrouting_operator.resources.worker_inputs import WorkerInputs

PLUGIN_VOLUME = "plugin"
PLUGIN_PATH = "/kvrouting-plugin"
# Contract with the plug-in's image: packages and their metadata lie here, as on a PYTHONPATH, and `cp` exists.
PLUGIN_IMAGE_PATH = "/opt/kvrouting-plugin"
STATE_ENDPOINT = f"tcp://127.0.0.1:{STATE_PORT}"

_CACHE_VOLUME = "cache"
_SHM_VOLUME = "shared-memory"
_TMP_VOLUME = "tmp"
_STARTUP_PERIOD_S = 5
# Tensor-parallel processes exchange tensors over /dev/shm; a container's own is 64 MiB.
_SHM_SINGLE = "1Gi"
_SHM_PARALLEL = "8Gi"


def engine_container(inputs: WorkerInputs, images: Images, pre_stop: Object) -> Object:
    """The container. pre_stop: what holds its end back until its requests are done."""
    engine = inputs.engine
    simulated = engine.runtime == "simulated"
    files = engine_files(inputs)
    command, args = _simulated(inputs) if simulated else _sglang(inputs)
    container: Object = {
        "name": ENGINE_CONTAINER,
        **image(engine.image or (images.simulated if simulated else images.sglang), engine.image_pull_policy),
        "command": command,
        "args": [*args, *engine.args],
        "env": [*plain_env(_own_env(inputs)), *files.env, *spec_env(engine.env)],
        "ports": [{"name": "http", "containerPort": ENGINE_PORT, "protocol": "TCP"}],
        "volumeMounts": _mounts(inputs, files),
        "securityContext": restricted_security() if simulated else unprivileged_security(),
        "lifecycle": {"preStop": pre_stop},
        "terminationMessagePolicy": "FallbackToLogsOnError",
        **_probes(inputs),
    }
    resources = _resources(inputs)
    return {**container, "resources": resources} if resources else container


def engine_files(inputs: WorkerInputs) -> ModelFiles:
    """What the engine reads: SGLang the model, the simulated engine only its tokenizer."""
    return tokenizer_files(inputs.model) if inputs.engine.runtime == "simulated" else model_files(inputs.model)


def engine_volumes(inputs: WorkerInputs) -> list[Object]:
    """The volumes of the engine's container."""
    engine, cache = inputs.engine, inputs.engine.cache_volume
    shm = engine.shared_memory_size or (_SHM_PARALLEL if inputs.tensor_parallel > 1 else _SHM_SINGLE)
    volumes = [*engine_files(inputs).volumes, empty_volume(_SHM_VOLUME, medium="Memory", sizeLimit=str(shm))]
    if cache.claim_name is not None:
        volumes.append(claim_volume(_CACHE_VOLUME, cache.claim_name, read_only=False))
    else:
        volumes.append(empty_volume(_CACHE_VOLUME, **({"sizeLimit": str(cache.size)} if cache.size else {})))
    if engine.runtime == "simulated":
        volumes.append(empty_volume(_TMP_VOLUME))
    elif engine.plugin.source == "copy":
        volumes.append(empty_volume(PLUGIN_VOLUME))
    return volumes


def plugin_container(inputs: WorkerInputs, images: Images) -> Object | None:
    """The init container that copies the plug-in into the pod; None if the engine's image has it."""
    plugin = inputs.engine.plugin
    if inputs.engine.runtime == "simulated" or plugin.source == "image":
        return None
    return {
        "name": PLUGIN_CONTAINER,
        **image(plugin.image or images.plugin, plugin.image_pull_policy),
        "command": ["cp", "-r", f"{PLUGIN_IMAGE_PATH}/.", PLUGIN_PATH],
        "volumeMounts": [mount(PLUGIN_VOLUME, PLUGIN_PATH, read_only=False)],
        "securityContext": restricted_security(),
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }


def _mounts(inputs: WorkerInputs, files: ModelFiles) -> list[Object]:
    mounts = [
        *files.mounts,
        mount(_SHM_VOLUME, "/dev/shm", read_only=False),  # noqa: S108 - the name is the kernel's
        mount(_CACHE_VOLUME, inputs.engine.cache_volume.mount_path, read_only=False),
    ]
    if inputs.engine.runtime == "simulated":
        mounts.append(mount(_TMP_VOLUME, "/tmp", read_only=False))  # noqa: S108
    elif inputs.engine.plugin.source == "copy":
        mounts.append(mount(PLUGIN_VOLUME, PLUGIN_PATH))
    return mounts


def _own_env(inputs: WorkerInputs) -> dict[str, str]:
    """The plug-in refuses settings that it does not know, so there is nothing else with its prefix."""
    engine = inputs.engine
    env = {"HF_HOME": engine.cache_volume.mount_path}
    if engine.runtime == "simulated":
        return {**env, **_simulated_tracing(inputs)}
    env["KVROUTING_ENGINE_POLICY"] = engine.eviction.policy
    env["KVROUTING_ENGINE_STATE_ENDPOINT"] = STATE_ENDPOINT
    if engine.eviction.seed is not None:
        env["KVROUTING_ENGINE_SEED"] = str(engine.eviction.seed)
    if engine.plugin.source == "copy":
        env["PYTHONPATH"] = PLUGIN_PATH
    return env


def _simulated_tracing(inputs: WorkerInputs) -> dict[str, str]:
    tracing = inputs.tracing
    if tracing is None or not tracing.engine:
        return {}
    return {
        "KVROUTING_ENGINE_TRACING": "true",
        "OTEL_EXPORTER_OTLP_ENDPOINT": tracing.endpoint,
        "OTEL_SERVICE_NAME": f"{inputs.pool}-engine",
    }


def _sglang(inputs: WorkerInputs) -> tuple[list[str], list[str]]:
    engine, files = inputs.engine, model_files(inputs.model)
    memory = engine.memory_fraction if engine.memory_fraction is not None else inputs.gpu.defaults.memory_fraction
    events = {
        "publisher": "zmq",
        "endpoint": f"tcp://127.0.0.1:{EVENTS_PORT}",
        "bind": True,
        "topic": "kv-events",
        "replay_endpoint": f"tcp://127.0.0.1:{REPLAY_PORT}",
    }
    args = [f"--model-path={files.location}"]
    args += [f"--revision={files.revision}"] if files.revision else []
    args += [
        f"--served-model-name={inputs.model.requested_name}",
        "--host=0.0.0.0",
        f"--port={ENGINE_PORT}",
        f"--tp-size={inputs.tensor_parallel}",
        *([f"--dp-size={engine.data_parallel}"] if engine.data_parallel > 1 else []),
        f"--page-size={_page_size(inputs)}",
        f"--mem-fraction-static={memory:g}",
        "--radix-cache-backend=rlt",
        f"--kv-events-config={json.dumps(events, separators=(',', ':'))}",
        # The wildcard is the form that makes the engine bind; the NetworkPolicy keeps the port to the pod.
        f"--load-publish-endpoint=tcp://*:{LOAD_PORT}",
        "--enable-metrics",
        "--enable-cache-report",
        *_sglang_tracing(inputs),
    ]
    return ["python3", "-m", "sglang.launch_server"], args


def _page_size(inputs: WorkerInputs) -> int:
    return inputs.engine.page_size if inputs.engine.page_size is not None else inputs.gpu.defaults.page_size


def _sglang_tracing(inputs: WorkerInputs) -> list[str]:
    if inputs.tracing is None or not inputs.tracing.engine:
        return []
    collector = inputs.tracing.endpoint.split("://", 1)[1]
    return ["--enable-trace", f"--otlp-traces-endpoint={collector}", f"--otlp-service-name={inputs.pool}-engine"]


def _simulated(inputs: WorkerInputs) -> tuple[list[str], list[str]]:
    engine, files = inputs.engine, tokenizer_files(inputs.model)
    worker_class = inputs.gpu.prior or (inputs.gpu.class_ if inputs.gpu.class_ != "custom" else "L40")
    args = [
        f"--served-model-name={inputs.model.requested_name}",
        f"--tokenizer={files.location or 'bytes'}",
        "--host=0.0.0.0",
        f"--port={ENGINE_PORT}",
        f"--kv-events-port={EVENTS_PORT}",
        f"--replay-port={REPLAY_PORT}",
        f"--load-port={LOAD_PORT}",
        f"--state-port={STATE_PORT}",
        f"--worker-class={worker_class}",
        f"--page-size={_page_size(inputs)}",
        f"--dp-size={engine.data_parallel}",
        f"--eviction={engine.eviction.policy}",
        *([f"--seed={engine.eviction.seed}"] if engine.eviction.seed is not None else []),
    ]
    return ["kvrouting", "engine"], args


def _probes(inputs: WorkerInputs) -> Object:
    budget = math.ceil(inputs.engine.startup_seconds / _STARTUP_PERIOD_S)
    return {
        "startupProbe": http_probe(
            "/health", ENGINE_PORT, period_s=_STARTUP_PERIOD_S, timeout_s=_STARTUP_PERIOD_S, failures=budget
        ),
        "readinessProbe": http_probe("/health", ENGINE_PORT, period_s=5, timeout_s=5, failures=3),
        # A full engine is slow to answer; only one that has been silent for two minutes is started anew.
        "livenessProbe": http_probe("/health", ENGINE_PORT, period_s=20, timeout_s=20, failures=6),
    }


def _resources(inputs: WorkerInputs) -> Object:
    resources = inputs.engine.resources.as_container()
    if inputs.gpu.count:
        for kind in ("requests", "limits"):
            resources.setdefault(kind, {})[inputs.gpu.resource_name] = str(inputs.gpu.count)
    return resources
