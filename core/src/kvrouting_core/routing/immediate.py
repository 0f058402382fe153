"""A policy that answers each arrival at once."""

from __future__ import annotations

from collections.abc import Sequence

from kvrouting_core.identity import WorkerId
from kvrouting_core.routing.admission import Admission, Overload
from kvrouting_core.routing.bookkeeping import Bookkeeping
from kvrouting_core.routing.choice import Chooser, Observer, ReportReader
from kvrouting_core.routing.decision import Action, Dispatch, Refusal, RefusalReason
from kvrouting_core.routing.events import (
    Arrival,
    Ended,
    Event,
    FirstToken,
    LoadReport,
    PrefixArrived,
    WorkerGone,
    WorkerJoined,
    WorkerPaused,
)
from kvrouting_core.routing.policy import WorkerBelief


class ImmediatePolicy:
    """Asks the chooser at each arrival and keeps the books. Implements `Policy`."""

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
        self._books = Bookkeeping(name, admission=admission, observer=observer, report_reader=report_reader)
        self._ledger = self._books.ledger
        self._chooser = chooser

    @property
    def name(self) -> str:
        """The name under which it is configured."""
        return self._books.name

    @property
    def waiting(self) -> int:
        """Always 0 between events."""
        return self._ledger.waiting

    def in_flight(self, worker: WorkerId) -> int:
        """Requests dispatched to the worker and not ended; 0 if it is unknown."""
        return self._ledger.in_flight(worker)

    def beliefs(self, *, now_ms: float) -> Sequence[WorkerBelief]:
        """Each known worker, in order of joining."""
        return self._books.beliefs(now_ms=now_ms)

    def handle(self, event: Event, *, now_ms: float) -> Sequence[Action]:
        """Takes one event; an arrival is answered by one action, any other event by none."""
        match event:
            case Arrival():
                return (self._arrived(event, now_ms),)
            case FirstToken():
                self._books.first_token(event, now_ms=now_ms)
            case Ended():
                self._books.ended(event, now_ms=now_ms)
            case LoadReport():
                self._books.reported(event, now_ms=now_ms)
            case PrefixArrived():
                self._ledger.prefix_arrived(event.request_id)
            case WorkerJoined():
                self._books.joined(event)
            case WorkerPaused():
                self._ledger.pause(event.worker)
            case WorkerGone():
                self._books.left(event)
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
        return self._books.dispatch(self._ledger.arrive(arrival, now_ms=now_ms), choice, now_ms=now_ms)
