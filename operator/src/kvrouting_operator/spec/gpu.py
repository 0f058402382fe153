"""The GPUs of a pool's workers. One pool has one class."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kvrouting_operator.spec.part import ObjectName, Part

GpuClassName = Literal["L40", "L40S", "H200", "custom"]


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuDefaults:
    """What a class brings. product: value of NVIDIA's feature discovery label; empty: any node. page_size: tokens."""

    product: str
    memory_fraction: float
    page_size: int = 1


# Memory fractions leave room for activations and CUDA graphs: about 6 GB on a card of 46 GB, 17 GB on one of 141 GB.
GPU_DEFAULTS: Mapping[str, GpuDefaults] = MappingProxyType(
    {
        "L40": GpuDefaults(product="NVIDIA-L40", memory_fraction=0.85),
        "L40S": GpuDefaults(product="NVIDIA-L40S", memory_fraction=0.85),
        "H200": GpuDefaults(product="NVIDIA-H200", memory_fraction=0.88, page_size=16),
        "custom": GpuDefaults(product="", memory_fraction=0.85),
    }
)


class Toleration(Part, frozen=True, kw_only=True):
    """As in a pod."""

    key: Annotated[
        Annotated[str, Meta(max_length=316)] | None, Meta(description="Taint key; absent with operator Exists: all.")
    ] = None
    operator: Annotated[Literal["Exists", "Equal"], Meta(description="How the value is compared.")] = "Equal"
    value: Annotated[Annotated[str, Meta(max_length=63)] | None, Meta(description="Taint value.")] = None
    effect: Annotated[
        Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None, Meta(description="Taint effect; absent: all.")
    ] = None
    toleration_seconds: Annotated[
        Annotated[int, Meta(ge=0)] | None, Meta(description="How long a NoExecute taint is borne.")
    ] = None


class GpuSpec(Part, frozen=True, kw_only=True):
    """The GPUs of each worker."""

    class_: Annotated[
        GpuClassName,
        Meta(
            description="Card of the workers. L40, L40S and H200 bring a node selector (nvidia.com/gpu.product), "
            "a toleration of the taint nvidia.com/gpu, a memory fraction, a page size and the "
            "router's first guess of their speed; custom brings only the toleration."
        ),
    ] = msgspec.field(name="class")
    count: Annotated[
        int,
        Meta(
            description="GPUs of each worker. 0 requests none, and the node selector and toleration of the class "
            "do not apply: for the simulated engine, or for class custom.",
            ge=0,
            le=16,
        ),
    ] = 1
    prior: Annotated[
        Annotated[str, Meta(max_length=63)] | None,
        Meta(
            description="Name of the router's first guess of the speed, where the class is not enough: L40, "
            "L40S, H200, H200-mixtral-8x7b, H200x2-llama-70b, H200x4-llama-70b. Default: the class.",
        ),
    ] = None
    node_selector: Annotated[
        Annotated[dict[str, Annotated[str, Meta(max_length=63)]], Meta(max_length=32)] | None,
        Meta(
            description="Labels that a worker's node must have. Replaces that of the class, also when empty.",
        ),
    ] = None
    tolerations: Annotated[
        Annotated[tuple[Toleration, ...], Meta(max_length=32)] | None,
        Meta(description="Tolerations of the workers. Replace that of the class, also when empty."),
    ] = None
    runtime_class_name: Annotated[
        ObjectName | None, Meta(description="RuntimeClass of the workers, for example nvidia.")
    ] = None
    resource_name: Annotated[
        str,
        Meta(
            description="Extended resource that is requested.", pattern="^[a-z0-9.-]+/[A-Za-z0-9._-]+$", max_length=253
        ),
    ] = "nvidia.com/gpu"

    @property
    def defaults(self) -> GpuDefaults:
        """What the class brings."""
        return GPU_DEFAULTS[self.class_]

    @property
    def selected_nodes(self) -> dict[str, str]:
        """The node selector that applies."""
        if self.node_selector is not None:
            return dict(self.node_selector)
        if self.count == 0 or not self.defaults.product:
            return {}
        return {"nvidia.com/gpu.product": self.defaults.product}

    @property
    def tolerated(self) -> tuple[Toleration, ...]:
        """The tolerations that apply."""
        if self.tolerations is not None:
            return self.tolerations
        if self.count == 0:
            return ()
        return (Toleration(key=self.resource_name, operator="Exists", effect="NoSchedule"),)
