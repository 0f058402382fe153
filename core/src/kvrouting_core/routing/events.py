"""What a routing policy is told. All times are ms on the caller's clock, all lengths tokens."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvrouting_core.identity import WorkerId
from kvrouting_core.service_time import StepTimes


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutingRequest:
    """One request as routing sees it.

    blocks: hash of each full routing block of the (first) prompt, in order; empty when nothing can be matched.
    prompt_tokens: of that prompt, at least 1.
    further_prompt_tokens: of the other prompts of a list; they are estimated, not matched.
    sequences: answers to be generated (prompts times `n`).
    max_output_tokens: the client's own limit per answer; None if it set none.
    excluded: workers that already failed this request.
    """

    request_id: str
    blocks: Sequence[int]
    prompt_tokens: int
    further_prompt_tokens: int = 0
    sequences: int = 1
    max_output_tokens: int | None = None
    excluded: frozenset[WorkerId] = field(default_factory=frozenset)

    def __post_init__(self) -> None:
        if self.prompt_tokens < 1:
            raise ValueError(f"prompt_tokens must be at least 1, got {self.prompt_tokens}")
        if self.further_prompt_tokens < 0:
            raise ValueError(f"further_prompt_tokens must not be negative, got {self.further_prompt_tokens}")
        if self.sequences < 1:
            raise ValueError(f"sequences must be at least 1, got {self.sequences}")
        if self.max_output_tokens is not None and self.max_output_tokens < 0:
            raise ValueError(f"max_output_tokens must not be negative, got {self.max_output_tokens}")


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerOptions:
    """How the engine orders prefill and decode (SGLang's options): a policy that plans must know it."""

    max_running_requests: int = 2048
    chunked_prefill_tokens: int = 8192
    max_prefill_tokens: int = 16384
    prefill_decode_interval: int = 0  # decode steps forced between prefills; 0: prefill always first
    mixed_chunk: bool = False

    def __post_init__(self) -> None:
        for name in ("max_running_requests", "chunked_prefill_tokens", "max_prefill_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.prefill_decode_interval < 0:
            raise ValueError(f"prefill_decode_interval must not be negative, got {self.prefill_decode_interval}")


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerProfile:
    """What a worker says of itself when it joins."""

    worker: WorkerId
    worker_class: str  # a key of service_time.WORKER_CLASSES; an unknown one gets the pool's default prior
    capacity_tokens: int
    times: StepTimes | None = None  # of a class that was measured here; None: as `worker_class` says
    page_size_tokens: int = 1  # an engine reuses whole pages of a prefix
    scheduler: SchedulerOptions = field(default_factory=SchedulerOptions)

    def __post_init__(self) -> None:
        if self.page_size_tokens < 1:
            raise ValueError(f"page_size_tokens of {self.worker} must be at least 1, got {self.page_size_tokens}")
        if self.capacity_tokens < 1:
            raise ValueError(f"capacity_tokens of {self.worker} must be at least 1, got {self.capacity_tokens}")


class Outcome(enum.Enum):
    """How a request, or one attempt of it, ended."""

    COMPLETED = "completed"
    FAILED = "failed"  # the worker's fault: nothing is learned of its speed
    REJECTED = "rejected"  # the request's own fault (4xx): never held against the worker
    CANCELLED = "cancelled"  # the client left, waiting or running


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrival:
    """A request wants a worker. A retry arrives again under its id, after its attempt ended, excluding the worker.

    arrived_ms: when the client's request came first; None: now.
    """

    request: RoutingRequest
    arrived_ms: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstToken:
    """The first token of a dispatched request came back."""

    request_id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """A request ended, waiting or dispatched; its reservation is released. Exactly once per arrival.

    output_tokens, cached_tokens: as the engine reports them; None if it does not say.
    """

    request_id: str
    outcome: Outcome
    output_tokens: int | None = None
    cached_tokens: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadReport:
    """The engine's report of its load, as of `reported_ms`. The two totals are cumulative since its start."""

    worker: WorkerId
    reported_ms: float
    running_requests: int
    waiting_requests: int
    used_tokens: int
    waiting_uncached_tokens: int
    total_prefill_uncached_tokens: int
    total_prefill_busy_us: int


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerJoined:
    """A worker may be chosen from now on: new, resumed after a pause, or restarted with a new profile.

    restarted: the engine is a new process: what was learned from counters starts anew, its cache is empty.
    """

    profile: WorkerProfile
    restarted: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerPaused:
    """A worker must not be chosen for now (suspect, resyncing or draining); what runs there goes on."""

    worker: WorkerId
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerGone:
    """A worker is no more. Requests dispatched to it still end with `Ended`, each on its own."""

    worker: WorkerId
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefixArrived:
    """The index has caught up with what the worker cached for this request: its in-flight credit ends."""

    request_id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Tick:
    """Only time has passed. Told a few times a second while requests wait: a worker that sends no first tokens and no
    reports gets room by time alone."""


Event = Arrival | FirstToken | Ended | LoadReport | WorkerJoined | WorkerPaused | WorkerGone | PrefixArrived | Tick
