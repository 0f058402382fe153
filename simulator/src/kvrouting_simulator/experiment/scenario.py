"""What is simulated: a pool, a workload, a policy. The same scenario and seed give the same bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvrouting_core.blocks import page_size as checked_page_size
from kvrouting_core.blocks import routing_block_size
from kvrouting_core.eviction import DEFAULT_POLICY, POLICIES
from kvrouting_core.routing.events import SchedulerOptions
from kvrouting_core.routing.policy import AdmissionLimits
from kvrouting_core.service_time import worker_class
from kvrouting_simulator.bounds import at_least, one_of, positive
from kvrouting_simulator.workloads import WorkloadSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSpec:
    """One worker. capacity_tokens None: what its class holds. slow_factor: its steps take so many times as long from
    slow_from_ms on. told_class: what it says of itself, right or wrong; None: the truth. told_prefill_factor: how much
    longer it says that its prefill takes than that class.
    """

    worker_class: str = "L40"
    capacity_tokens: int | None = None
    eviction: str = DEFAULT_POLICY
    page_size: int = 1
    scheduler: SchedulerOptions = field(default_factory=SchedulerOptions)
    slow_from_ms: float = 0.0
    slow_factor: float = 1.0
    told_class: str | None = None
    told_prefill_factor: float = 1.0

    def __post_init__(self) -> None:
        worker_class(self.worker_class)
        if self.told_class is not None:
            worker_class(self.told_class)
        checked_page_size(self.page_size)
        if self.capacity_tokens is not None:
            at_least(self.page_size, "capacity_tokens", self.capacity_tokens)
        one_of(tuple(POLICIES), "eviction", self.eviction)
        at_least(0, "slow_from_ms", self.slow_from_ms)
        positive("slow_factor", self.slow_factor)
        positive("told_prefill_factor", self.told_prefill_factor)

    @property
    def tokens(self) -> int:
        """Capacity in tokens."""
        return self.capacity_tokens or worker_class(self.worker_class).capacity_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """The engine of a worker (by position) dies at killed_ms; at back_ms a new one with an empty cache is there.

    back_ms None: the worker never comes back.
    """

    worker: int
    killed_ms: float
    back_ms: float | None = None

    def __post_init__(self) -> None:
        at_least(0, "failures.worker", self.worker)
        at_least(0, "failures.killed_ms", self.killed_ms)
        if self.back_ms is not None and not self.killed_ms < self.back_ms < math.inf:
            raise ValueError(f"failures.back_ms {self.back_ms} must be after killed_ms {self.killed_ms}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Delays:
    """hop_ms: router to engine, each way. index_ms: from a change of a cache to the router's index.

    report_interval_ms: between load reports. report_on_change: also report after each step that changed the load,
    as SGLang does.
    """

    hop_ms: float = 1.0
    index_ms: float = 5.0
    report_interval_ms: float = 1000.0
    report_on_change: bool = False

    def __post_init__(self) -> None:
        at_least(0, "hop_ms", self.hop_ms)
        at_least(0, "index_ms", self.index_ms)
        positive("report_interval_ms", self.report_interval_ms)


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """One run.

    policy, policy_parameters: as `build_policy` takes them. block_tokens: routing block.
    routers: how many share the requests, each with a policy of its own.
    seed: order and arrivals of the workload, evictions, the policy's ties.
    tie_seed: of the policy's ties alone; None: they follow from `seed` too.
    max_attempts: how often the router sends one request before it gives up.
    resubmissions: how often a client sends a request again whose answer was cut.
    goodput_ttft_ms: target for the summary's goodput; None: none.
    settings: how the scenario was given, for the report; the run does not depend on it.
    """

    workload: WorkloadSpec
    workers: Sequence[WorkerSpec]
    policy: str = "lbgr"
    policy_parameters: Mapping[str, object] = field(default_factory=dict)
    name: str = ""
    routers: int = 1
    block_tokens: int = 64
    seed: int = 1
    tie_seed: int | None = None
    delays: Delays = field(default_factory=Delays)
    failures: Sequence[Failure] = ()
    limits: AdmissionLimits = field(default_factory=AdmissionLimits)
    max_attempts: int = 3
    resubmissions: int = 0
    goodput_ttft_ms: float | None = None
    settings: Mapping[str, str | int | float | bool | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.workers:
            raise ValueError("workers is empty: a pool has at least one")
        routing_block_size(self.block_tokens)
        at_least(0, "seed", self.seed)
        at_least(1, "routers", self.routers)
        at_least(1, "max_attempts", self.max_attempts)
        at_least(0, "resubmissions", self.resubmissions)
        if self.goodput_ttft_ms is not None:
            positive("goodput_ttft_ms", self.goodput_ttft_ms)
        for failure in self.failures:
            if failure.worker >= len(self.workers):
                raise ValueError(f"failures.worker {failure.worker} is not among the {len(self.workers)} workers")

    @property
    def title(self) -> str:
        """Its name, or policy + eviction."""
        evictions = dict.fromkeys(worker.eviction for worker in self.workers)
        return self.name or f"{self.policy} + {'/'.join(evictions)}"
