"""`lbgr`: requests wait in the router until their worker has room, and all of them are planned again at each event."""

from __future__ import annotations

import random
from collections.abc import Sequence

from kvrouting_core.identity import WorkerId
from kvrouting_core.routing.admission import Admission
from kvrouting_core.routing.bookkeeping import Bookkeeping
from kvrouting_core.routing.choice import Choice
from kvrouting_core.routing.decision import Action, Refusal, RefusalReason
from kvrouting_core.routing.events import (
    Arrival,
    Ended,
    Event,
    FirstToken,
    LoadReport,
    PrefixArrived,
    Tick,
    WorkerGone,
    WorkerJoined,
    WorkerPaused,
)
from kvrouting_core.routing.lbgr_beliefs import LbgrBeliefs
from kvrouting_core.routing.ledger import Worker
from kvrouting_core.routing.parameters import LbgrParameters
from kvrouting_core.routing.pending_queue import PendingQueue, Queued
from kvrouting_core.routing.planner import MATCH_LASTS_MS, Planner
from kvrouting_core.routing.policy import AdmissionLimits, CacheView, WorkerBelief
from kvrouting_core.routing.release import Release


class LatePolicy:
    """Keeps the line and plans it at arrivals, first tokens, ends, reports, changes of the pool and ticks.

    A request that no worker may take is refused on arrival, and when the last worker that it might go to is gone; while
    one is only paused it waits.
    """

    def __init__(
        self,
        name: str,
        parameters: LbgrParameters,
        *,
        cache: CacheView,
        block_size_tokens: int,
        rng: random.Random,
        limits: AdmissionLimits,
        match_lasts_ms: float = MATCH_LASTS_MS,
    ) -> None:
        self._parameters = parameters
        self._limits = limits
        self._beliefs = LbgrBeliefs(parameters, rng=rng)
        self._admission = Admission(limits)
        self._books = Bookkeeping(name, admission=self._admission, observer=self._beliefs, report_reader=self._beliefs)
        self._ledger = self._books.ledger
        self._pending = PendingQueue()
        self._shortest_ms = 0.0
        self._planner = Planner(
            parameters,
            self._beliefs,
            Release(parameters, max_in_flight=limits.max_in_flight_per_worker),
            cache=cache,
            block_size_tokens=block_size_tokens,
            rng=rng,
            match_lasts_ms=match_lasts_ms,
        )

    @property
    def name(self) -> str:
        """The name under which it is configured."""
        return self._books.name

    @property
    def waiting(self) -> int:
        """Requests in the line."""
        return len(self._pending)

    @property
    def assigned(self) -> int:
        """Requests assigned in all plans so far, each as often as it was: what planning has cost."""
        return self._planner.assigned

    def in_flight(self, worker: WorkerId) -> int:
        """Requests dispatched to the worker and not ended; 0 if it is unknown."""
        return self._ledger.in_flight(worker)

    def beliefs(self, *, now_ms: float) -> Sequence[WorkerBelief]:
        """Each known worker, in order of joining."""
        return self._books.beliefs(now_ms=now_ms)

    def handle(self, event: Event, *, now_ms: float) -> Sequence[Action]:
        """Takes one event; returns what it makes possible."""
        actions: list[Action] = []
        match event:
            case Arrival():
                return self._arrived(event, now_ms)
            case FirstToken():
                self._books.first_token(event, now_ms=now_ms)
            case Ended():
                self._ended(event, now_ms)
            case LoadReport():
                self._books.reported(event, now_ms=now_ms)
                self._look_at_queues(now_ms)
            case PrefixArrived():
                self._ledger.prefix_arrived(event.request_id)
                return ()
            case WorkerJoined():
                self._books.joined(event)
                self._pool_changed(now_ms)
            case WorkerPaused():
                self._ledger.pause(event.worker)
                self._pool_changed(now_ms)
            case WorkerGone():
                self._books.left(event)
                self._pool_changed(now_ms)
                actions += self._refuse_the_stranded()
            case Tick():
                pass
        self._plan(actions, now_ms)
        return actions

    # Requests

    def _arrived(self, arrival: Arrival, now_ms: float) -> Sequence[Action]:
        request = arrival.request
        self._ledger.check_new(request.request_id)
        if not self._ledger.eligible(request):
            return (Refusal(request_id=request.request_id, reason=RefusalReason.NO_WORKER),)
        # Who was admitted and lost its worker is not turned away for those who came after it.
        admitted = bool(request.excluded)
        excess_ms = 0.0 if admitted else self._excess_wait_ms(now_ms)
        if excess_ms > 0:
            return (self._overloaded(request.request_id, excess_ms),)
        item = Queued(self._ledger.arrive(arrival, now_ms=now_ms))
        self._planner.estimate_cost(item, self._pending, self._workers(), now_ms=now_ms)
        self._pending.insert(item, key=item.waiting.arrived_ms + self._parameters.size_precedence * item.least_ms)
        actions: list[Action] = []
        self._plan(actions, now_ms)
        full = len(self._pending) > self._limits.max_waiting
        if full and not admitted and self._pending.holds(request.request_id):
            self._pending.remove(request.request_id)
            self._ledger.withdraw(request.request_id)
            actions.append(self._overloaded(request.request_id, self._expected_wait_ms() / max(1, len(self._pending))))
        return actions

    def _excess_wait_ms(self, now_ms: float) -> float:
        """How far the expected wait is above the limit; at most 0 if it is not."""
        excess_ms = self._expected_wait_ms() - self._limits.max_expected_wait_ms
        if excess_ms > 0:
            # Queues may have drained since the last report, and prefixes that several wait for may have been sent.
            self._look_at_queues(now_ms)
            self._planner.estimate_outdated(self._pending, self._workers(), now_ms=now_ms)
            excess_ms = self._expected_wait_ms() - self._limits.max_expected_wait_ms
        return excess_ms

    def _pool_changed(self, now_ms: float) -> None:
        self._pending.outdate_all()
        self._look_at_queues(now_ms)

    def _look_at_queues(self, now_ms: float) -> None:
        workers = self._workers()
        self._shortest_ms = self._planner.shortest_queue_ms(workers, now_ms=now_ms) if workers else 0.0

    def _overloaded(self, request_id: str, excess_ms: float) -> Refusal:
        retry_after_ms = self._admission.retry_after_ms(excess_ms)
        return Refusal(request_id=request_id, reason=RefusalReason.OVERLOADED, retry_after_ms=retry_after_ms)

    def _expected_wait_ms(self) -> float:
        """Until a request that arrives now would begin: what waits here, over all workers, and the shortest queue as of
        the last report: what this router adds to it is bounded by the release."""
        return self._shortest_ms + self._pending.work_ms / max(1, len(self._workers()))

    def _ended(self, event: Ended, now_ms: float) -> None:
        if self._books.ended(event, now_ms=now_ms) is None:
            self._pending.remove(event.request_id)

    def _refuse_the_stranded(self) -> list[Action]:
        """Requests that no known worker may take any more."""
        known = {worker.id for worker in self._ledger.workers}
        stranded = [i.waiting.request.request_id for i in self._pending.all() if known <= i.waiting.request.excluded]
        for request_id in stranded:
            self._pending.remove(request_id)
            self._ledger.withdraw(request_id)
        return [Refusal(request_id=name, reason=RefusalReason.NO_WORKER) for name in stranded]

    # Planning

    def _workers(self) -> Sequence[Worker]:
        return self._ledger.eligible_workers

    def _plan(self, actions: list[Action], now_ms: float) -> None:
        def send(item: Queued, choice: Choice) -> None:
            self._pending.remove(item.waiting.request.request_id)
            actions.append(self._books.dispatch(item.waiting, choice, now_ms=now_ms))
            if choice.prefix:
                blocks = item.waiting.request.blocks
                self._pending.outdate(len(blocks) - len(choice.prefix), blocks)

        self._planner.plan(self._pending, self._workers(), send, now_ms=now_ms)
