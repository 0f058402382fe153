"""A policy that answers each arrival at once."""

from __future__ import annotations

from collections.abc import Sequence

from kvrouting_core.identity import WorkerId
from kvrouting_core.routing.admission import Admission, Overload
from kvrouting_core.routing.choice import Choice, Chooser, Observer, ReportReader
from kvrouting_core.routing.decision import Action, Decision, Dispatch, Refusal, RefusalReason
from kvrouting_core.routing.events import (
    Arrival,
    Ended,
    Event,
    FirstToken,
    LoadReport,
    Outcome,
    PrefixArrived,
    RoutingRequest,
    WorkerGone,
    WorkerJoined,
    WorkerPaused,
)
from kvrouting_core.routing.ledger import Ledger, Worker
from kvrouting_core.routing.policy import WorkerBelief
from kvrouting_core.routing.prior import class_prior

_PRIOR_OF_UNKNOWN_CLASS = "L40"


class ImmediatePolicy:
    """Keeps the ledger, asks the chooser, tells the observer. Implements `Policy`."""

    def __init__(
        self,
        name: str,
        chooser: Chooser,
        *,
        admission: Admission,
        observer: Observer | None = None,
        report_reader: ReportReader | None = None,
    ) -> None:
        """observer, report_reader: who learns from events and engines; None for a policy that learns nothing."""
        self._name = name
        self._chooser = chooser
        self._admission = admission
        self._observer = observer
        self._report_reader = report_reader
        self._ledger = Ledger()

    @property
    def name(self) -> str:
        """The name under which it is configured."""
        return self._name

    @property
    def waiting(self) -> int:
        """Always 0 between events."""
        return self._ledger.waiting

    def in_flight(self, worker: WorkerId) -> int:
        """Requests dispatched to the worker and not ended; 0 if it is unknown."""
        return self._ledger.in_flight(worker)

    def beliefs(self, *, now_ms: float) -> Sequence[WorkerBelief]:
        """Each known worker, in order of joining."""
        return [self._belief(worker, now_ms) for worker in self._ledger.workers]

    def handle(self, event: Event, *, now_ms: float) -> Sequence[Action]:
        """Takes one event; an arrival is answered by one action, any other event by none."""
        match event:
            case Arrival():
                return (self._arrived(event, now_ms),)
            case FirstToken():
                self._first_token(event, now_ms)
            case Ended():
                self._ended(event, now_ms)
            case LoadReport():
                self._reported(event, now_ms)
            case PrefixArrived():
                self._ledger.prefix_arrived(event.request_id)
            case WorkerJoined():
                self._joined(event)
            case WorkerPaused():
                self._ledger.pause(event.worker)
            case WorkerGone():
                self._left(event)
        return ()

    def _arrived(self, arrival: Arrival, now_ms: float) -> Dispatch | Refusal:
        request = arrival.request
        self._ledger.check_new(request.request_id)
        workers = self._ledger.eligible(request)
        if not workers:
            return Refusal(request_id=request.request_id, reason=RefusalReason.NO_WORKER)
        choice = self._chooser.choose(request, workers, now_ms=now_ms)
        if isinstance(choice, Overload):
            return Refusal(
                request_id=request.request_id,
                reason=RefusalReason.OVERLOADED,
                retry_after_ms=choice.retry_after_ms,
            )
        self._ledger.arrive(arrival, now_ms=now_ms)
        return self._dispatched(request, choice, now_ms)

    def _dispatched(self, request: RoutingRequest, choice: Choice, now_ms: float) -> Dispatch:
        worker = self._ledger.worker(choice.chosen.worker)
        reservation = self._ledger.reserve(request.request_id, worker, choice.prefix, now_ms=now_ms)
        if self._observer is not None:
            self._observer.reserved(reservation, choice.chosen)
        decision = Decision(
            request_id=request.request_id,
            policy=self._name,
            worker=worker.id,
            reason=choice.reason,
            decided_ms=now_ms,
            waited_ms=0.0,
            prompt_tokens=request.prompt_tokens,
            candidates=choice.candidates,
        )
        return Dispatch(request_id=request.request_id, worker=worker.id, decision=decision)

    def _first_token(self, event: FirstToken, now_ms: float) -> None:
        reservation = self._ledger.first_token(event.request_id, now_ms=now_ms)
        if self._observer is not None:
            self._observer.first_token(reservation, now_ms=now_ms)

    def _ended(self, event: Ended, now_ms: float) -> None:
        reservation = self._ledger.end(event)
        if reservation is None:
            return
        if event.outcome is Outcome.COMPLETED:
            self._admission.completed(now_ms - reservation.dispatched_ms)
        if self._observer is not None:
            self._observer.ended(reservation, event, now_ms=now_ms)

    def _reported(self, report: LoadReport, now_ms: float) -> None:
        self._ledger.worker(report.worker)
        if self._report_reader is not None:
            self._report_reader.reported(report, now_ms=now_ms)

    def _joined(self, event: WorkerJoined) -> None:
        anew = event.restarted or not self._ledger.knows(event.profile.worker)
        worker = self._ledger.join(event)
        if self._observer is not None:
            self._observer.joined(worker, anew=anew)

    def _left(self, event: WorkerGone) -> None:
        worker = self._ledger.leave(event.worker)
        if self._observer is not None:
            self._observer.left(worker)

    def _belief(self, worker: Worker, now_ms: float) -> WorkerBelief:
        if self._observer is not None:
            return self._observer.belief(worker, now_ms=now_ms)
        return WorkerBelief(
            worker=worker.id,
            eligible=worker.eligible,
            in_flight=worker.in_flight,
            queue_ms=0.0,
            residual_ms=0.0,
            prefill_ms_per_token=class_prior(worker.profile, _PRIOR_OF_UNKNOWN_CLASS).prefill_ms_per_token,
            speed_factor=1.0,
            observations=0,
        )
