"""The engine of each worker."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kvrouting_operator.spec.part import (
    Argument,
    Image,
    ObjectName,
    Part,
    Path,
    Quantity,
    Rule,
    flag_name,
    owned_flags_rule,
)
from kvrouting_operator.spec.references import EnvVar
from kvrouting_operator.spec.workload import PullPolicy, Resources, check_quantity

EvictionName = Literal["rlt", "lru", "lfu", "slru", "random", "rlt-adaptive"]
Runtime = Literal["sglang", "simulated"]

# Flag → what to set instead.
SGLANG_FLAGS: Mapping[str, str] = MappingProxyType(
    {
        "--model-path": "set model.name or model.source",
        "--model": "set model.name or model.source",
        "--revision": "set model.revision",
        "--served-model-name": "set model.servedName",
        "--host": "the pool's Services and probes need it as it is",
        "--port": "the pool's Services and probes need it as it is",
        "--kv-events-config": "the sidecar needs it as it is",
        "--load-publish-endpoint": "the sidecar needs it as it is",
        "--radix-cache-backend": "set engine.eviction",
        "--disable-radix-cache": "without a prefix cache there is nothing to route by",
        "--page-size": "set engine.pageSize",
        "--mem-fraction-static": "set engine.memoryFraction",
        "--tp": "set engine.tensorParallel",
        "--tp-size": "set engine.tensorParallel",
        "--tensor-parallel-size": "set engine.tensorParallel",
        "--dp": "set engine.dataParallel",
        "--dp-size": "set engine.dataParallel",
        "--data-parallel-size": "set engine.dataParallel",
        "--nnodes": "a worker is one pod",
        "--node-rank": "a worker is one pod",
        "--disaggregation-mode": "a worker both prefills and decodes",
        "--api-key": "the NetworkPolicy admits only the routers",
        "--enable-trace": "set tracing.engine",
        "--otlp-traces-endpoint": "set tracing.endpoint",
    }
)
SIMULATED_FLAGS: Mapping[str, str] = MappingProxyType(
    {
        "--served-model-name": "set model.servedName",
        "--host": "the pool's Services and probes need it as it is",
        "--port": "the pool's Services and probes need it as it is",
        "--events-host": "the sidecar needs it as it is",
        "--kv-events-port": "the sidecar needs it as it is",
        "--replay-port": "the sidecar needs it as it is",
        "--load-port": "the sidecar needs it as it is",
        "--state-port": "the sidecar needs it as it is",
        "--page-size": "set engine.pageSize",
        "--dp-size": "set engine.dataParallel",
    }
)
OWNED_FLAGS: Mapping[Runtime, Mapping[str, str]] = MappingProxyType(
    {"sglang": SGLANG_FLAGS, "simulated": SIMULATED_FLAGS}
)


class Plugin(Part, frozen=True, kw_only=True):
    """How the eviction plug-in gets into SGLang. The simulated engine has its policies built in."""

    source: Annotated[
        Literal["copy", "image"],
        Meta(
            description="copy: an init container copies the plug-in into the stock SGLang image (a volume on "
            "PYTHONPATH); image: engine.image has it installed."
        ),
    ] = "copy"
    image: Annotated[Image | None, Meta(description="Image that carries the plug-in; default: the operator's.")] = None
    image_pull_policy: Annotated[PullPolicy | None, Meta(description="Default: the cluster's own.")] = None


class Eviction(Part, frozen=True, kw_only=True):
    """How the engine's prefix cache evicts."""

    policy: Annotated[
        EvictionName,
        Meta(
            description="rlt-adaptive: learns what is used again, within rlt's guarantee; rlt: randomized leaf token "
            "eviction, which learns nothing; the others are for comparison. A worker is ready "
            "only while the engine proves this policy at work."
        ),
    ] = "rlt-adaptive"
    seed: Annotated[
        Annotated[int, Meta(ge=0, le=2147483647)] | None,
        Meta(description="Of its random choices; absent: the engine's own, another for each start."),
    ] = None


class CacheVolume(Part, frozen=True, kw_only=True):
    """Where downloads are kept (HF_HOME). Without a claim: an empty volume that ends with the pod."""

    RULES = (
        Rule(
            cel="!(has(self.claimName) && has(self.size))",
            message="cacheVolume.size limits the empty volume; a claim has its own size",
        ),
    )

    claim_name: Annotated[
        ObjectName | None, Meta(description="PersistentVolumeClaim, ReadWriteMany if there is more than one worker.")
    ] = None
    size: Annotated[Quantity | None, Meta(description="Limit of the empty volume; absent: none.")] = None
    mount_path: Annotated[Path, Meta(description="Where it is mounted.")] = "/cache"

    def __post_init__(self) -> None:
        if self.claim_name is not None and self.size is not None:
            raise ValueError("cacheVolume.size limits the empty volume; a claim has its own size")
        if self.size is not None:
            check_quantity("cacheVolume.size", self.size)


_ENV_RULE = "self.env.all(e, !e.name.startsWith('KVROUTING_') && e.name != 'PYTHONPATH')"


class EngineSpec(Part, frozen=True, kw_only=True):
    """The engine of each worker."""

    RULES = (
        owned_flags_rule("args", SGLANG_FLAGS, condition="self.runtime == 'sglang'"),
        owned_flags_rule("args", SIMULATED_FLAGS, condition="self.runtime == 'simulated'"),
        Rule(cel=_ENV_RULE, message="engine.env: KVROUTING_* and PYTHONPATH belong to the pool"),
    )

    runtime: Annotated[
        Runtime,
        Meta(
            description="sglang: python3 -m sglang.launch_server; simulated: kvrouting engine, an engine without "
            "a GPU that makes its answers up, for trying the whole path."
        ),
    ] = "sglang"
    image: Annotated[
        Image | None, Meta(description="Default: the operator's, a stock SGLang of the supported version.")
    ] = None
    image_pull_policy: Annotated[PullPolicy | None, Meta(description="Default: the cluster's own.")] = None
    plugin: Annotated[Plugin, Meta(description="How the eviction plug-in gets into SGLang.")] = msgspec.field(
        default_factory=Plugin
    )
    args: Annotated[
        tuple[Argument, ...],
        Meta(
            description="Further arguments of the engine, in the form --flag=value or --flag. Those that the "
            "pool sets itself are refused by name.",
            max_length=64,
        ),
    ] = ()
    tensor_parallel: Annotated[
        Annotated[int, Meta(ge=1, le=16)] | None,
        Meta(description="GPUs that share one copy of the model; default: gpu.count / dataParallel."),
    ] = None
    data_parallel: Annotated[
        int, Meta(description="Copies of the model in one worker. Each is a routing target of its own.", ge=1, le=16)
    ] = 1
    page_size: Annotated[
        Annotated[int, Meta(ge=1, le=64)] | None,
        Meta(
            description="Tokens in a page of the KV cache; default: that of the class, 16 for H200 and 1 for the "
            "others. The eviction decides page by page: on a fast card many small pages take a large share of its time."
        ),
    ] = None
    memory_fraction: Annotated[
        Annotated[float, Meta(ge=0.1, le=0.98)] | None,
        Meta(
            description="Part of the GPU's memory for weights and KV cache; default: that of the class.",
        ),
    ] = None
    eviction: Annotated[Eviction, Meta(description="How the prefix cache evicts.")] = msgspec.field(
        default_factory=Eviction
    )
    resources: Annotated[Resources, Meta(description="Of the engine's container; the GPUs are set by gpu.")] = (
        msgspec.field(default_factory=Resources)
    )
    env: Annotated[
        tuple[EnvVar, ...], Meta(description="Environment of the engine. KVROUTING_* is the pool's own.", max_length=64)
    ] = ()
    shared_memory_size: Annotated[
        Quantity | None, Meta(description="Size of /dev/shm; default: 1Gi, with tensor parallelism 8Gi.")
    ] = None
    cache_volume: Annotated[CacheVolume, Meta(description="Where downloads are kept.")] = msgspec.field(
        default_factory=CacheVolume
    )
    startup_seconds: Annotated[
        int, Meta(description="How long an engine may take to load its model before it is restarted.", ge=10, le=86400)
    ] = 1800

    def __post_init__(self) -> None:
        owned = OWNED_FLAGS[self.runtime]
        for argument in self.args:
            if flag_name(argument) in owned:
                raise ValueError(
                    f"engine.args sets {argument}, which the pool sets itself: {owned[flag_name(argument)]}"
                )
        for variable in self.env:
            if variable.name.startswith("KVROUTING_") or variable.name == "PYTHONPATH":
                raise ValueError(f"engine.env sets {variable.name}: KVROUTING_* and PYTHONPATH belong to the pool")
        if self.shared_memory_size is not None:
            check_quantity("engine.sharedMemorySize", self.shared_memory_size)
