"""All that a worker's pod is rendered from: nothing else of a spec can change it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from kvrouting_operator.pool import PoolIdentity
from kvrouting_operator.spec import PoolSpec
from kvrouting_operator.spec.engine import EngineSpec
from kvrouting_operator.spec.gpu import GpuSpec
from kvrouting_operator.spec.model import ModelSpec
from kvrouting_operator.spec.pool import DrainSpec, SidecarSpec, TracingSpec
from kvrouting_operator.spec.router import RouterSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerInputs:
    """pool, namespace: the pool's. tensor_parallel: GPUs per copy of the model. keys: fingerprint of the pool's keys.
    tracing: None unless the engines trace. router_tls: Secret with the routers' CA. The operator's default images and
    the cluster's version are no inputs: a new operator or cluster alone renders nothing anew.
    """

    pool: str
    namespace: str
    model: ModelSpec
    gpu: GpuSpec
    engine: EngineSpec
    sidecar: SidecarSpec
    drain: DrainSpec
    tensor_parallel: int
    keys: str
    trigger: str
    tracing: TracingSpec | None
    router_tls: str | None
    pod_template: dict[str, Any] | None

    @classmethod
    def of(cls, pool: PoolIdentity, spec: PoolSpec, *, keys: str) -> WorkerInputs:
        """keys: fingerprint of the pool's keys."""
        tracing = spec.tracing if spec.tracing is not None and spec.tracing.engine else None
        return cls(
            pool=pool.name,
            namespace=pool.namespace,
            model=spec.model,
            gpu=spec.gpu,
            engine=spec.engine,
            sidecar=spec.sidecar,
            drain=spec.drain,
            tensor_parallel=spec.tensor_parallel,
            keys=keys,
            trigger=spec.rollout.trigger,
            tracing=tracing,
            router_tls=spec.router.tls_secret_name,
            pod_template=spec.pod_template,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterInputs:
    """As WorkerInputs, for a router's pod. Of the router's spec the number of replicas and the Service are no
    inputs.
    """

    pool: str
    namespace: str
    model: ModelSpec
    router: RouterSpec
    block_size: int
    drain: DrainSpec
    keys: str
    trigger: str
    tracing: TracingSpec | None

    @classmethod
    def of(cls, pool: PoolIdentity, spec: PoolSpec, *, keys: str) -> RouterInputs:
        """keys: fingerprint of the pool's keys."""
        return cls(
            pool=pool.name,
            namespace=pool.namespace,
            model=spec.model,
            router=without_scale_and_service(spec.router),
            block_size=spec.sidecar.block_size,
            drain=spec.drain,
            keys=keys,
            trigger=spec.rollout.trigger,
            tracing=spec.tracing,
        )


def without_scale_and_service(router: RouterSpec) -> RouterSpec:
    """The same router with default replicas and Service: neither is in its pod."""
    plain = RouterSpec()
    return msgspec.structs.replace(router, replicas=plain.replicas, service=plain.service)
