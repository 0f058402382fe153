"""What the router knows of each worker, and the state that follows from it. Plain data: time comes in."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from kvrouting_core.identity import WorkerId
from kvrouting_core.routing.events import SchedulerOptions, WorkerProfile
from kvrouting_router.agreement import Agreement
from kvrouting_router.breaker import Breaker
from kvrouting_router.options import BreakerOptions, SyncOptions


class WorkerState(enum.Enum):
    """syncing → live → suspect → draining → gone."""

    SYNCING = "syncing"  # known, its cache view is not complete
    LIVE = "live"  # may be chosen
    SUSPECT = "suspect"  # silent, unhealthy, unproven or failing: not chosen, running requests go on
    DRAINING = "draining"  # leaves on purpose: not chosen, running requests go on
    GONE = "gone"  # no more; its cache view is dropped


class Mirror(enum.Enum):
    """Where the view of a worker's cache comes from."""

    EXACT = "exact"  # proven equal to the engine's cache
    PARTIAL = "partial"  # a subset of it
    APPROXIMATE = "approximate"  # guessed from the router's own decisions


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerFacts:
    """What a worker says of itself when it introduces itself. epoch: empty for one without a sidecar.

    required_eviction: the policy without whose proof it must not be chosen; empty: none is required.
    proven_eviction: what it proves at work as it introduces itself; empty: nothing.
    """

    worker: WorkerId
    pod_uid: str
    dp_rank: int
    dp_size: int
    epoch: str
    endpoint: str
    worker_class: str
    capacity_tokens: int
    mirror: Mirror
    scheduler: SchedulerOptions = field(default_factory=SchedulerOptions)
    engine_version: str = ""
    page_size_tokens: int = 0
    tokenizer_fingerprint: str = ""
    tokenizer_mismatch: str = ""
    required_eviction: str = ""
    proven_eviction: str = ""
    has_sidecar: bool = True

    def __post_init__(self) -> None:
        if not self.endpoint.startswith(("http://", "https://")):
            raise ValueError(f"http_endpoint of {self.worker} must be http://host:port, got {self.endpoint!r}")
        if self.capacity_tokens < 1:
            raise ValueError(f"capacity_tokens of {self.worker} must be at least 1, got {self.capacity_tokens}")
        if not 0 <= self.dp_rank < max(1, self.dp_size):
            raise ValueError(f"dp_rank {self.dp_rank} of {self.worker} must be below dp_size {self.dp_size}")

    @property
    def profile(self) -> WorkerProfile:
        """What a policy must know."""
        return WorkerProfile(
            worker=self.worker,
            worker_class=self.worker_class,
            capacity_tokens=self.capacity_tokens,
            page_size_tokens=max(1, self.page_size_tokens),
            scheduler=self.scheduler,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineLoad:
    """The engine's report of its load, and its age on arrival."""

    running_requests: int
    waiting_requests: int
    used_tokens: int
    max_total_tokens: int
    waiting_uncached_tokens: int
    total_prefill_uncached_tokens: int
    total_prefill_busy_us: int
    age_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Vitals:
    """The last heartbeat."""

    engine_healthy: bool
    events_flowing: bool
    end_to_end_verified: bool
    reason: str
    blocks: int
    cached_tokens: int
    eviction_policy: str
    eviction_proven_live: bool
    mirror: Mirror
    load: EngineLoad | None


@dataclass(slots=True, kw_only=True)
class Worker:
    """One known worker. state and reason are set by the registry alone."""

    facts: WorkerFacts
    breaker: Breaker
    agreement: Agreement
    last_seen_s: float
    state: WorkerState = WorkerState.SYNCING
    reason: str = "waits for its snapshot"
    since_s: float = 0.0
    synced: bool = False
    draining: str = ""
    left: str = ""  # why it is gone for certain; empty: it is not
    restarted: bool = False  # an earlier engine process was known
    vitals: Vitals | None = None
    resyncs: int = 0
    prompt_tokens: int = 0
    matched_tokens: int = 0
    reported_cached_tokens: int = 0

    @property
    def mirror(self) -> Mirror:
        """What the view may claim now: a sidecar may lower its word."""
        return self.vitals.mirror if self.vitals else self.facts.mirror

    @property
    def proven_eviction(self) -> str:
        """The eviction policy that its engine proves at work now; empty: none."""
        if self.vitals is None:
            return self.facts.proven_eviction
        return self.vitals.eviction_policy if self.vitals.eviction_proven_live else ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Transition:
    """A worker's state changed."""

    worker: Worker
    old: WorkerState
    new: WorkerState
    reason: str


class WorkerRegistry:
    """All workers of the pool. States are derived from facts at each call of `refresh`, never set by an event."""

    def __init__(self, *, sync: SyncOptions, breaker: BreakerOptions, block_size_tokens: int) -> None:
        self._sync = sync
        self._breaker_options = breaker
        self._block_size_tokens = block_size_tokens
        self._workers: dict[WorkerId, Worker] = {}

    def __iter__(self) -> Iterator[Worker]:
        return iter(tuple(self._workers.values()))

    def __len__(self) -> int:
        return len(self._workers)

    def get(self, worker: WorkerId) -> Worker | None:
        """The worker, if it is known and not gone."""
        return self._workers.get(worker)

    def introduce(self, facts: WorkerFacts, *, now_s: float) -> Worker:
        """A worker says who it is, for the first time or again after a reconnect.

        The same epoch keeps all that is known; a new one starts anew, in state syncing.
        """
        known = self._workers.get(facts.worker)
        if known is not None and known.facts.epoch == facts.epoch:
            known.facts = facts
            known.last_seen_s = now_s
            return known
        worker = Worker(
            facts=facts,
            breaker=Breaker(self._breaker_options),
            agreement=Agreement(block_size_tokens=self._block_size_tokens),
            last_seen_s=now_s,
            since_s=now_s,
            restarted=known is not None,
        )
        self._workers[facts.worker] = worker
        return worker

    def sharing_endpoint(self, facts: WorkerFacts) -> Iterable[Worker]:
        """Other workers that claim the same address and rank: the address has changed hands."""
        return [
            w
            for w in self._workers.values()
            if w.facts.worker != facts.worker and (w.facts.endpoint, w.facts.dp_rank) == (facts.endpoint, facts.dp_rank)
        ]

    def refresh(self, *, now_s: float) -> list[Transition]:
        """Derives every state anew. Workers that are gone are forgotten."""
        changes = []
        for worker in tuple(self._workers.values()):
            state, reason = self._derive(worker, now_s)
            worker.reason = reason
            if state is worker.state:
                continue
            changes.append(Transition(worker=worker, old=worker.state, new=state, reason=reason))
            worker.state, worker.since_s = state, now_s
            if state is WorkerState.GONE:
                del self._workers[worker.facts.worker]
        return changes

    def _derive(self, worker: Worker, now_s: float) -> tuple[WorkerState, str]:
        silent_s = now_s - worker.last_seen_s
        if worker.left:
            return WorkerState.GONE, worker.left
        if silent_s >= self._sync.gone_s:
            return WorkerState.GONE, f"silent for {self._sync.gone_s:g} s"
        if worker.draining:
            return WorkerState.DRAINING, worker.draining
        if silent_s >= self._sync.silence_s:
            return WorkerState.SUSPECT, f"silent for {self._sync.silence_s:g} s"
        if worker.breaker.is_open:
            return WorkerState.SUSPECT, worker.breaker.reason
        if worker.vitals is not None and not worker.vitals.engine_healthy:
            return WorkerState.SUSPECT, worker.vitals.reason or "its engine is not healthy"
        if not worker.synced:
            return WorkerState.SYNCING, "waits for its snapshot"
        required = worker.facts.required_eviction
        if required and worker.proven_eviction != required:
            reports = f"it proves {worker.proven_eviction}" if worker.proven_eviction else "it proves none"
            return WorkerState.SUSPECT, f"its engine does not prove the eviction policy {required} at work: {reports}"
        return WorkerState.LIVE, worker.vitals.reason if worker.vitals else ""
