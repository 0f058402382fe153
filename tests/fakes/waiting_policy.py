"""A routing policy that makes requests wait, for tests of what stands around a policy."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from kvrouting_core.identity import WorkerId
from kvrouting_core.routing.decision import Action, Candidate, Decision, Dispatch, Reason, Refusal, RefusalReason
from kvrouting_core.routing.events import (
    Arrival,
    Ended,
    Event,
    FirstToken,
    LoadReport,
    PrefixArrived,
    RoutingRequest,
    WorkerGone,
    WorkerJoined,
    WorkerPaused,
)
from kvrouting_core.routing.ledger import Ledger, Waiting, Worker
from kvrouting_core.routing.policy import AdmissionLimits, WorkerBelief


class OneAtATime:
    """First come, first served: a request waits until a worker has fewer than `at_once` in flight.

    It answers an arrival at once, or later with the event that makes room, or never if the request is `Ended` while it
    waits. A request that no worker may ever take (all excluded, or none there) is refused on arrival; one whose last
    worker leaves while it waits goes on waiting for the next. A full queue refuses with OVERLOADED.
    """

    name = "one_at_a_time"

    def __init__(self, *, at_once: int = 1, limits: AdmissionLimits | None = None) -> None:
        if at_once < 1:
            raise ValueError(f"at_once must be at least 1, got {at_once}")
        self._at_once = at_once
        self._limits = limits or AdmissionLimits()
        self._ledger = Ledger()
        self._queue: deque[Waiting] = deque()

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return self._ledger.waiting

    def in_flight(self, worker: WorkerId) -> int:
        """Requests dispatched to the worker and not ended; 0 if it is unknown."""
        return self._ledger.in_flight(worker)

    def beliefs(self, *, now_ms: float) -> Sequence[WorkerBelief]:
        """It believes nothing but what it counts."""
        return [
            WorkerBelief(
                worker=worker.id,
                eligible=worker.eligible,
                in_flight=worker.in_flight,
                queue_ms=0.0,
                residual_ms=0.0,
                prefill_ms_per_token=0.0,
                speed_factor=1.0,
                observations=0,
            )
            for worker in self._ledger.workers
        ]

    def handle(self, event: Event, *, now_ms: float) -> Sequence[Action]:
        """Takes one event; returns what it makes possible."""
        match event:
            case Arrival():
                refusal = self._arrived(event, now_ms)
                if refusal is not None:
                    return (refusal,)
            case FirstToken():
                self._ledger.first_token(event.request_id, now_ms=now_ms)
            case PrefixArrived():
                self._ledger.prefix_arrived(event.request_id)
            case Ended():
                self._ended(event)
            case LoadReport():
                self._ledger.worker(event.worker)
            case WorkerJoined():
                self._ledger.join(event)
            case WorkerPaused():
                self._ledger.pause(event.worker)
            case WorkerGone():
                self._ledger.leave(event.worker)
        return self._dispatch_all(now_ms)

    def _arrived(self, arrival: Arrival, now_ms: float) -> Refusal | None:
        request = arrival.request
        self._ledger.check_new(request.request_id)
        if not self._ledger.eligible(request):
            return Refusal(request_id=request.request_id, reason=RefusalReason.NO_WORKER)
        if not self._with_room(request) and len(self._queue) >= self._limits.max_waiting:
            return Refusal(request_id=request.request_id, reason=RefusalReason.OVERLOADED, retry_after_ms=1000.0)
        self._queue.append(self._ledger.arrive(arrival, now_ms=now_ms))
        return None

    def _ended(self, event: Ended) -> None:
        if self._ledger.end(event) is None:
            self._queue = deque(w for w in self._queue if w.request.request_id != event.request_id)

    def _dispatch_all(self, now_ms: float) -> list[Action]:
        actions: list[Action] = []
        for waiting in list(self._queue):
            workers = self._with_room(waiting.request)
            if workers:
                self._queue.remove(waiting)
                actions.append(self._dispatch(waiting, workers, now_ms))
        return actions

    def _dispatch(self, waiting: Waiting, workers: Sequence[Worker], now_ms: float) -> Dispatch:
        request = waiting.request
        chosen = min(workers, key=lambda w: w.in_flight)
        candidates = tuple(_candidate(w, request) for w in workers)
        self._ledger.reserve(request.request_id, chosen, (), now_ms=now_ms)
        decision = Decision(
            request_id=request.request_id,
            policy=self.name,
            worker=chosen.id,
            reason=Reason.LEAST_LOAD,
            decided_ms=now_ms,
            waited_ms=now_ms - waiting.arrived_ms,
            prompt_tokens=request.prompt_tokens,
            candidates=candidates,
        )
        return Dispatch(request_id=request.request_id, worker=chosen.id, decision=decision)

    def _with_room(self, request: RoutingRequest) -> list[Worker]:
        return [w for w in self._ledger.eligible(request) if w.in_flight < self._at_once]


def _candidate(worker: Worker, request: RoutingRequest) -> Candidate:
    return Candidate(
        worker=worker.id,
        matched_tokens=0,
        credited_tokens=0,
        uncached_tokens=request.prompt_tokens,
        in_flight=worker.in_flight,
        service_ms=0.0,
        queue_ms=0.0,
        residual_ms=0.0,
        prediction_ms=0.0,
        price_ms=0.0,
        cost_ms=0.0,
    )
