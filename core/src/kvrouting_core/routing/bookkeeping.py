"""What every policy does with an event besides choosing: the ledger is kept, and whoever learns is told."""

from __future__ import annotations

from collections.abc import Sequence

from kvrouting_core.routing.admission import Admission
from kvrouting_core.routing.choice import Choice, Observer, ReportReader
from kvrouting_core.routing.decision import Decision, Dispatch
from kvrouting_core.routing.events import (
    Ended,
    FirstToken,
    LoadReport,
    Outcome,
    WorkerGone,
    WorkerJoined,
)
from kvrouting_core.routing.ledger import Ledger, Reservation, Waiting, Worker
from kvrouting_core.routing.policy import WorkerBelief
from kvrouting_core.routing.prior import class_prior

_PRIOR_OF_UNKNOWN_CLASS = "L40"


class Bookkeeping:
    """Ledger, admission and learners of one policy."""

    def __init__(
        self,
        name: str,
        *,
        admission: Admission,
        observer: Observer | None = None,
        report_reader: ReportReader | None = None,
    ) -> None:
        """observer, report_reader: who learns from events and engines; None for a policy that learns nothing."""
        self.name = name
        self.admission = admission
        self.ledger = Ledger()
        self._observer = observer
        self._report_reader = report_reader

    def dispatch(self, waiting: Waiting, choice: Choice, *, now_ms: float) -> Dispatch:
        """Reserves the chosen worker for a request that is in the ledger."""
        request = waiting.request
        worker = self.ledger.worker(choice.chosen.worker)
        reservation = self.ledger.reserve(request.request_id, worker, choice.prefix, now_ms=now_ms)
        if self._observer is not None:
            self._observer.reserved(reservation, choice.chosen)
        decision = Decision(
            request_id=request.request_id,
            policy=self.name,
            worker=worker.id,
            reason=choice.reason,
            decided_ms=now_ms,
            waited_ms=max(0.0, now_ms - waiting.offered_ms),
            prompt_tokens=request.prompt_tokens,
            candidates=choice.candidates,
        )
        return Dispatch(request_id=request.request_id, worker=worker.id, decision=decision)

    def first_token(self, event: FirstToken, *, now_ms: float) -> None:
        """A prefill is over."""
        reservation = self.ledger.first_token(event.request_id, now_ms=now_ms)
        if self._observer is not None:
            self._observer.first_token(reservation, now_ms=now_ms)

    def ended(self, event: Ended, *, now_ms: float) -> Reservation | None:
        """Releases a request. Returns: its reservation; None if it waited."""
        reservation = self.ledger.end(event)
        if reservation is None:
            return None
        if event.outcome is Outcome.COMPLETED:
            self.admission.completed(now_ms - reservation.dispatched_ms)
        if self._observer is not None:
            self._observer.ended(reservation, event, now_ms=now_ms)
        return reservation

    def reported(self, report: LoadReport, *, now_ms: float) -> None:
        """An engine speaks. Raises: ValueError for an unknown worker."""
        self.ledger.worker(report.worker)
        if self._report_reader is not None:
            self._report_reader.reported(report, now_ms=now_ms)

    def joined(self, event: WorkerJoined) -> None:
        """A worker may be chosen."""
        anew = event.restarted or not self.ledger.knows(event.profile.worker)
        worker = self.ledger.join(event)
        if self._observer is not None:
            self._observer.joined(worker, anew=anew)

    def left(self, event: WorkerGone) -> None:
        """A worker is no more."""
        worker = self.ledger.leave(event.worker)
        if self._observer is not None:
            self._observer.left(worker)

    def beliefs(self, *, now_ms: float) -> Sequence[WorkerBelief]:
        """Each known worker, in order of joining."""
        return [self._belief(worker, now_ms) for worker in self.ledger.workers]

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
