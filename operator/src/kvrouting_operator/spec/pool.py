"""The whole spec of a KVRoutingPool."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kvrouting_operator.spec.engine import EngineSpec
from kvrouting_operator.spec.gpu import GpuSpec
from kvrouting_operator.spec.model import ModelSpec
from kvrouting_operator.spec.part import INT_OR_STRING, Image, NamespaceName, Part, Rule
from kvrouting_operator.spec.router import RouterSpec
from kvrouting_operator.spec.workload import PullPolicy, Resources


class SidecarSpec(Part, frozen=True, kw_only=True):
    """The sidecar of each worker: it mirrors the engine's prefix cache and streams it to the routers."""

    image: Annotated[Image | None, Meta(description="Default: the operator's.")] = None
    image_pull_policy: Annotated[PullPolicy | None, Meta(description="Default: the cluster's own.")] = None
    block_size: Annotated[
        int,
        Meta(
            description="Tokens of a routing block. It cannot be changed: all workers and routers must agree at "
            "every moment.",
            ge=16,
            le=128,
        ),
    ] = 64
    resources: Annotated[
        Resources, Meta(description="Of the sidecar's container; default: requests of 50m CPU and 256Mi.")
    ] = msgspec.field(default_factory=Resources)


class TracingSpec(Part, frozen=True, kw_only=True):
    """Traces by OpenTelemetry (OTLP over gRPC)."""

    endpoint: Annotated[
        str,
        Meta(
            description="Collector, for example http://collector.observability.svc:4317.",
            pattern="^https?://[^/]+$",
            max_length=253,
        ),
    ]
    sampling: Annotated[
        float, Meta(description="Part of the requests that is traced; a caller's own decision goes first.", ge=0, le=1)
    ] = 1.0
    engine: Annotated[bool, Meta(description="Whether the engines send spans as well.")] = False


class MonitoringSpec(Part, frozen=True, kw_only=True):
    """Who may read the workers' metrics. The routers' are on their HTTP port, which is open to all."""

    namespaces: Annotated[
        tuple[NamespaceName, ...],
        Meta(
            description="Namespaces whose pods may reach the sidecars' HTTP port, where /metrics is: that of "
            "Prometheus. The engines' own port stays closed, as whoever reaches it can send prompts.",
            max_length=16,
        ),
    ] = ()


class DrainSpec(Part, frozen=True, kw_only=True):
    """What happens to requests under way when a worker or router leaves."""

    timeout_seconds: Annotated[
        int, Meta(description="How long a leaving worker or router waits for its requests to end.", ge=1, le=86400)
    ] = 300


class RolloutSpec(Part, frozen=True, kw_only=True):
    """How workers are replaced when their pods change."""

    RULES = (
        Rule(
            cel="!(string(self.maxSurge) in ['0', '0%'] && string(self.maxUnavailable) in ['0', '0%'])",
            message="rollout.maxSurge and rollout.maxUnavailable must not both be 0: nothing could be replaced",
        ),
    )

    max_surge: Annotated[
        int | str,
        Meta(
            description="Workers above replicas during a rollout. 0: a rollout needs no spare GPU.",
            extra_json_schema={**INT_OR_STRING, "pattern": "^[0-9]+%?$"},
        ),
    ] = 0
    max_unavailable: Annotated[
        int | str,
        Meta(
            description="Workers that may be missing during a rollout, and during a drain of nodes.",
            extra_json_schema={**INT_OR_STRING, "pattern": "^[0-9]+%?$"},
        ),
    ] = 1
    trigger: Annotated[
        str,
        Meta(
            description="Any change of this text renders all pods anew, with the operator's present version and "
            "default images, and rolls them out. A new operator alone does not.",
            max_length=253,
        ),
    ] = ""

    def __post_init__(self) -> None:
        if {str(self.max_surge), str(self.max_unavailable)} <= {"0", "0%"}:
            raise ValueError(
                "rollout.maxSurge and rollout.maxUnavailable must not both be 0: nothing could be replaced"
            )


class PoolSpec(Part, frozen=True, kw_only=True):
    """A pool of engines that share one model, behind routers that know each engine's prefix cache."""

    RULES = (
        Rule(cel="self.model == oldSelf.model", message="model cannot be changed: make another pool for another model"),
        Rule(
            cel="self.sidecar.blockSize == oldSelf.sidecar.blockSize",
            message="sidecar.blockSize cannot be changed: workers and routers must agree at every moment: make "
            "another pool",
        ),
        Rule(
            cel="self.gpu.count > 0 || self.engine.runtime == 'simulated' || self.gpu.class == 'custom'",
            message="gpu.count 0 needs engine.runtime simulated or gpu.class custom",
        ),
        Rule(
            cel="self.gpu.count == 0 || has(self.engine.tensorParallel) || "
            "self.gpu.count % self.engine.dataParallel == 0",
            message="gpu.count must be a multiple of engine.dataParallel, or set engine.tensorParallel",
        ),
        Rule(
            cel="self.gpu.count == 0 || !has(self.engine.tensorParallel) || "
            "self.engine.tensorParallel * self.engine.dataParallel <= self.gpu.count",
            message="engine.tensorParallel * engine.dataParallel must not exceed gpu.count",
        ),
        Rule(
            cel="!(self.gpu.resourceName in self.engine.resources.limits)"
            " && !(self.gpu.resourceName in self.engine.resources.requests)",
            message="engine.resources must not name the GPU: set gpu.count",
        ),
    )

    model: Annotated[ModelSpec, Meta(description="The model that all workers serve. It cannot be changed.")]
    gpu: Annotated[GpuSpec, Meta(description="The GPUs of each worker.")]
    replicas: Annotated[
        int,
        Meta(
            description="Number of workers. 0: none, and the routers answer 503. Only users and autoscalers "
            "change it, here or by /scale.",
            ge=0,
            le=1000,
        ),
    ] = 1
    engine: Annotated[EngineSpec, Meta(description="The engine of each worker.")] = msgspec.field(
        default_factory=EngineSpec
    )
    sidecar: Annotated[SidecarSpec, Meta(description="The sidecar of each worker.")] = msgspec.field(
        default_factory=SidecarSpec
    )
    router: Annotated[RouterSpec, Meta(description="The routers of the pool.")] = msgspec.field(
        default_factory=RouterSpec
    )
    tracing: Annotated[TracingSpec | None, Meta(description="Traces; absent: none.")] = None
    monitoring: Annotated[MonitoringSpec, Meta(description="Who may read the workers' metrics.")] = msgspec.field(
        default_factory=MonitoringSpec
    )
    drain: Annotated[DrainSpec, Meta(description="What happens to requests under way when a pod leaves.")] = (
        msgspec.field(default_factory=DrainSpec)
    )
    rollout: Annotated[RolloutSpec, Meta(description="How workers are replaced.")] = msgspec.field(
        default_factory=RolloutSpec
    )
    pod_template: Annotated[
        dict[str, Any] | None,
        Meta(
            description="Anything else that a worker's pod can carry, merged over it (strategic merge, metadata "
            "and spec; the containers are engine and sidecar). What would break the pool is refused by name."
        ),
    ] = None

    def __post_init__(self) -> None:
        gpu, engine = self.gpu, self.engine
        if gpu.count == 0 and engine.runtime != "simulated" and gpu.class_ != "custom":
            raise ValueError("gpu.count 0 needs engine.runtime simulated or gpu.class custom")
        if engine.tensor_parallel is None and gpu.count % engine.data_parallel:
            raise ValueError(
                f"gpu.count {gpu.count} must be a multiple of engine.dataParallel {engine.data_parallel}, "
                "or set engine.tensorParallel"
            )
        parallel = (engine.tensor_parallel or 1) * engine.data_parallel
        if gpu.count and engine.tensor_parallel is not None and parallel > gpu.count:
            raise ValueError(
                f"engine.tensorParallel * engine.dataParallel must not exceed gpu.count: {parallel} > {gpu.count}"
            )
        if gpu.resource_name in {*engine.resources.limits, *engine.resources.requests}:
            raise ValueError(f"engine.resources must not name {gpu.resource_name}: set gpu.count")

    @property
    def tensor_parallel(self) -> int:
        """GPUs that share one copy of the model; 1 without a GPU."""
        if self.engine.tensor_parallel is not None:
            return self.engine.tensor_parallel
        return max(1, self.gpu.count // self.engine.data_parallel)
