"""The routers."""

from __future__ import annotations

from kvrouting_operator.pod_override import apply_override
from kvrouting_operator.pool import Images, Object, PoolIdentity
from kvrouting_operator.resources.keys import HASH_KEY, JOIN_TOKEN
from kvrouting_operator.resources.model_files import tokenizer_files
from kvrouting_operator.resources.names import (
    GRPC_PORT,
    KEYS_ANNOTATION,
    ROUTER,
    ROUTER_CONTAINER,
    ROUTER_PORT,
    component_labels,
    keys_name,
    router_name,
    selector_labels,
)
from kvrouting_operator.resources.owned import owned
from kvrouting_operator.resources.pod_parts import (
    KEYS_PATH,
    KEYS_VOLUME,
    TLS_PATH,
    TLS_VOLUME,
    empty_volume,
    http_probe,
    image,
    mount,
    plain_env,
    pod_security,
    restricted_security,
    secret_volume,
)
from kvrouting_operator.resources.worker_inputs import RouterInputs
from kvrouting_operator.spec import PoolSpec

_API_KEYS_VOLUME = "api-keys"
_API_KEYS_PATH = "/etc/kvrouting/api-keys"
_TMP_VOLUME = "tmp"
_REQUESTS = {"requests": {"cpu": "250m", "memory": "512Mi"}}
# Before its end a router waits so long for the Service to forget it.
_LEAVING_S = 5
_ENDING_S = 15


def router_template(inputs: RouterInputs, images: Images) -> Object:
    """The pod template. Raises: InvalidSpecError if router.podTemplate changes what would break the pool."""
    spec: Object = {
        "serviceAccountName": router_name(inputs.pool),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": inputs.drain.timeout_seconds + _LEAVING_S + _ENDING_S,
        "securityContext": pod_security(),
        "containers": [_container(inputs, images)],
        "volumes": _volumes(inputs),
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": selector_labels(inputs.pool, ROUTER)},
            }
        ],
    }
    metadata: Object = {
        "labels": component_labels(inputs.pool, ROUTER),
        "annotations": {KEYS_ANNOTATION: inputs.keys},
    }
    return apply_override({"metadata": metadata, "spec": spec}, inputs.router.pod_template, field="router.podTemplate")


def router_deployment(pool: PoolIdentity, spec: PoolSpec, template: Object, annotations: dict[str, str]) -> Object:
    """The Deployment. A new router is ready before an old one goes; without workers none can be, and none has to be."""
    at_most_missing: int | str = 0 if spec.replicas else "100%"
    return owned(
        pool,
        api_version="apps/v1",
        kind="Deployment",
        name=router_name(pool.name),
        labels=component_labels(pool.name, ROUTER),
        annotations=annotations,
        spec={
            "replicas": spec.router.replicas,
            "selector": {"matchLabels": selector_labels(pool.name, ROUTER)},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": at_most_missing}},
            "template": template,
        },
    )


def _container(inputs: RouterInputs, images: Images) -> Object:
    router = inputs.router
    return {
        "name": ROUTER_CONTAINER,
        **image(router.image or images.router, router.image_pull_policy),
        "command": ["kvrouting", "router"],
        "args": [*_arguments(inputs), *router.args],
        "env": _env(inputs),
        "ports": [
            {"name": "http", "containerPort": ROUTER_PORT, "protocol": "TCP"},
            {"name": "grpc", "containerPort": GRPC_PORT, "protocol": "TCP"},
        ],
        "volumeMounts": _mounts(inputs),
        "resources": router.resources.as_container() or _REQUESTS,
        "securityContext": restricted_security(),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", str(_LEAVING_S)]}}},
        "startupProbe": http_probe("/healthz", ROUTER_PORT, period_s=1, timeout_s=2, failures=300),
        "readinessProbe": http_probe("/readyz", ROUTER_PORT, period_s=2, timeout_s=2, failures=2),
        "livenessProbe": http_probe("/healthz", ROUTER_PORT, period_s=10, timeout_s=5, failures=6),
    }


def _arguments(inputs: RouterInputs) -> list[str]:
    router, tokenizer = inputs.router, tokenizer_files(inputs.model)
    args = [
        f"--model={inputs.model.requested_name}",
        f"--pool={inputs.pool}",
        f"--block-size={inputs.block_size}",
        f"--hash-key-file={KEYS_PATH}/{HASH_KEY}",
        f"--join-token-file={KEYS_PATH}/{JOIN_TOKEN}",
        "--http-host=0.0.0.0",
        f"--http-port={ROUTER_PORT}",
        "--grpc-host=0.0.0.0",
        f"--grpc-port={GRPC_PORT}",
        f"--policy={router.policy.name}",
        f"--shutdown-s={inputs.drain.timeout_seconds}",
    ]
    args += [f"--policy-parameter={name}={value}" for name, value in sorted(router.policy.parameters.items())]
    args += [f"--tokenizer={tokenizer.location}"] if tokenizer.location else []
    args += [f"--tokenizer-revision={tokenizer.revision}"] if tokenizer.revision else []
    if router.api_keys_secret is not None:
        args.append(f"--api-keys-file={_API_KEYS_PATH}/{router.api_keys_secret.key}")
    if router.tls_secret_name is not None:
        args += [f"--grpc-tls-cert-file={TLS_PATH}/tls.crt", f"--grpc-tls-key-file={TLS_PATH}/tls.key"]
    if inputs.tracing is not None:
        args.append("--tracing")
    return args


def _env(inputs: RouterInputs) -> list[Object]:
    # The file system is read-only but for /tmp: a tokenizer from the hub is kept there.
    env = {"HF_HOME": "/tmp/huggingface"}  # noqa: S108 - a volume of the pod
    if inputs.tracing is not None:
        env |= {
            "OTEL_EXPORTER_OTLP_ENDPOINT": inputs.tracing.endpoint,
            "OTEL_SERVICE_NAME": f"{inputs.pool}-router",
            "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
            "OTEL_TRACES_SAMPLER_ARG": f"{inputs.tracing.sampling:g}",
        }
    return [*plain_env(env), *tokenizer_files(inputs.model).env]


def _volumes(inputs: RouterInputs) -> list[Object]:
    router = inputs.router
    volumes = [
        secret_volume(KEYS_VOLUME, keys_name(inputs.pool), [HASH_KEY, JOIN_TOKEN]),
        empty_volume(_TMP_VOLUME),
        *tokenizer_files(inputs.model).volumes,
    ]
    if router.api_keys_secret is not None:
        volumes.append(secret_volume(_API_KEYS_VOLUME, router.api_keys_secret.name, [router.api_keys_secret.key]))
    if router.tls_secret_name is not None:
        volumes.append(secret_volume(TLS_VOLUME, router.tls_secret_name, ["tls.crt", "tls.key"]))
    return volumes


def _mounts(inputs: RouterInputs) -> list[Object]:
    mounts = [
        mount(KEYS_VOLUME, KEYS_PATH),
        mount(_TMP_VOLUME, "/tmp", read_only=False),  # noqa: S108
        *tokenizer_files(inputs.model).mounts,
    ]
    if inputs.router.api_keys_secret is not None:
        mounts.append(mount(_API_KEYS_VOLUME, _API_KEYS_PATH))
    if inputs.router.tls_secret_name is not None:
        mounts.append(mount(TLS_VOLUME, TLS_PATH))
    return mounts
