"""Who is there, who serves what, and what is reserved: the state that all policies share.

Each request is waiting, dispatched or over; each step that contradicts this is a ValueError and changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvrouting_core.identity import WorkerId
from kvrouting_core.routing.events import Arrival, Ended, Outcome, RoutingRequest, WorkerJoined, WorkerProfile
from kvrouting_core.routing.prefix_credit import InFlightPrefixes


class Worker:
    """One worker: may it be chosen, how much of ours runs there, what is it about to hold."""

    __slots__ = ("credit", "eligible", "epoch", "gone", "id", "in_flight", "profile")

    def __init__(self, profile: WorkerProfile) -> None:
        self.id = profile.worker
        self.profile = profile
        self.eligible = True
        self.gone = False  # kept only until what was dispatched to it has ended
        self.in_flight = 0
        self.epoch = 0  # rises when its load and cache are void
        self.credit = InFlightPrefixes()

    def reusable_tokens(self, cached_tokens: int, prompt_tokens: int) -> int:
        """How much of a cached prefix its engine can take over: whole pages, and one token is left to compute."""
        tokens = min(cached_tokens, prompt_tokens - 1)
        return tokens - tokens % self.profile.page_size_tokens

    def void(self) -> None:
        """What was dispatched to it until now neither loads it any more nor leaves anything in its cache."""
        self.epoch += 1
        self.credit.clear()


class Waiting:
    """A request that arrived and has no answer yet.

    arrived_ms: when its client first sent it. offered_ms: when the policy was asked, the present attempt's.
    """

    __slots__ = ("arrived_ms", "offered_ms", "request")

    def __init__(self, request: RoutingRequest, *, arrived_ms: float, offered_ms: float) -> None:
        self.request = request
        self.arrived_ms = arrived_ms
        self.offered_ms = offered_ms


class Reservation:
    """A dispatched request. Its credit and its load are held until it ends or its worker's are void."""

    __slots__ = ("_epoch", "dispatched_ms", "first_token_ms", "prefix", "prefix_arrived", "request", "worker")

    def __init__(self, request: RoutingRequest, worker: Worker, prefix: Sequence[int], dispatched_ms: float) -> None:
        self.request = request
        self.worker = worker
        self.prefix = prefix  # blocks credited to the worker
        self.dispatched_ms = dispatched_ms
        self.first_token_ms: float | None = None
        self.prefix_arrived = False
        self._epoch = worker.epoch

    @property
    def held(self) -> bool:
        """Whether it still loads its worker: the worker neither went nor restarted since."""
        return self._epoch == self.worker.epoch


class Ledger:
    """Workers and requests of one policy."""

    def __init__(self) -> None:
        self._workers: dict[WorkerId, Worker] = {}
        self._waiting: dict[str, Waiting] = {}
        self._reservations: dict[str, Reservation] = {}
        self._eligible: list[Worker] = []

    # Workers

    def join(self, event: WorkerJoined) -> Worker:
        """A worker is there, again or for the first time. A restart, or a return, voids what it was doing."""
        profile = event.profile
        worker = self._workers.get(profile.worker)
        if worker is None or worker.gone:
            returning, worker = worker, Worker(profile)
            if returning is not None:
                self._take_over(returning, worker)
            self._workers[worker.id] = worker
        elif event.restarted:
            worker.void()
        worker.profile = profile
        worker.eligible = True
        self._list_eligible()
        return worker

    def _take_over(self, gone: Worker, returned: Worker) -> None:
        """What was dispatched before still counts as in flight until it ends; its load stays void."""
        returned.in_flight = gone.in_flight
        returned.epoch = gone.epoch
        del self._workers[gone.id]
        for reservation in self._reservations.values():
            if reservation.worker is gone:
                reservation.worker = returned

    def pause(self, worker: WorkerId) -> Worker:
        """It must not be chosen. Raises: ValueError for an unknown worker."""
        paused = self.worker(worker)
        paused.eligible = False
        self._list_eligible()
        return paused

    def leave(self, worker: WorkerId) -> Worker:
        """It is no more. Raises: ValueError for an unknown worker."""
        gone = self.worker(worker)
        gone.eligible = False
        gone.gone = True
        gone.void()
        if not gone.in_flight:
            del self._workers[worker]
        self._list_eligible()
        return gone

    def worker(self, worker: WorkerId) -> Worker:
        """A worker that joined and has not gone. Raises: ValueError for another."""
        found = self._workers.get(worker)
        if found is None or found.gone:
            known = ", ".join(w.id for w in self.workers) or "none"
            raise ValueError(f"worker {worker!r} has not joined or is gone; known: {known}")
        return found

    def knows(self, worker: WorkerId) -> bool:
        """Whether it joined and has not gone."""
        found = self._workers.get(worker)
        return found is not None and not found.gone

    @property
    def workers(self) -> Sequence[Worker]:
        """Workers that joined and have not gone, in order of joining."""
        return [w for w in self._workers.values() if not w.gone]

    def eligible(self, request: RoutingRequest) -> Sequence[Worker]:
        """Workers that the request may go to, in order of joining."""
        excluded = request.excluded
        if not excluded:
            return self._eligible
        return [w for w in self._eligible if w.id not in excluded]

    @property
    def eligible_workers(self) -> Sequence[Worker]:
        """Workers that may be chosen, in order of joining; another object whenever one joins, pauses or goes."""
        return self._eligible

    def _list_eligible(self) -> None:
        self._eligible = [w for w in self._workers.values() if w.eligible]

    # Requests

    @property
    def waiting(self) -> int:
        """Requests without an answer."""
        return len(self._waiting)

    def in_flight(self, worker: WorkerId) -> int:
        """Requests dispatched to the worker and not ended; 0 if it is unknown."""
        found = self._workers.get(worker)
        return found.in_flight if found else 0

    def arrive(self, arrival: Arrival, *, now_ms: float) -> Waiting:
        """Takes a request in. Raises: ValueError if its id is waiting or dispatched."""
        request_id = arrival.request.request_id
        self.check_new(request_id)
        arrived_ms = now_ms if arrival.arrived_ms is None else arrival.arrived_ms
        waiting = Waiting(arrival.request, arrived_ms=arrived_ms, offered_ms=now_ms)
        self._waiting[request_id] = waiting
        return waiting

    def check_new(self, request_id: str) -> None:
        """Raises: ValueError if the id is waiting or dispatched."""
        if request_id in self._waiting or request_id in self._reservations:
            raise ValueError(f"request {request_id!r} arrived before and has not ended")

    def withdraw(self, request_id: str) -> None:
        """Forgets a waiting request that is refused. Raises: ValueError if it does not wait."""
        self._take_waiting(request_id)

    def reserve(self, request_id: str, worker: Worker, prefix: Sequence[int], *, now_ms: float) -> Reservation:
        """Dispatches a waiting request and credits `prefix`, the blocks that its worker will hold beyond the index.

        Raises: ValueError if the request does not wait, or if its worker may not be chosen for it.
        """
        if not worker.eligible:
            raise ValueError(f"worker {worker.id!r} is paused or gone: {request_id!r} cannot go there")
        waiting = self._waiting.get(request_id)
        if waiting is not None and worker.id in waiting.request.excluded:
            raise ValueError(f"worker {worker.id!r} is excluded for {request_id!r}")
        request = self._take_waiting(request_id).request
        worker.in_flight += 1
        worker.credit.add(prefix)
        reservation = Reservation(request, worker, prefix, now_ms)
        self._reservations[request_id] = reservation
        return reservation

    def first_token(self, request_id: str, *, now_ms: float) -> Reservation:
        """Raises: ValueError if the request is not dispatched or had its first token."""
        reservation = self._dispatched(request_id)
        if reservation.first_token_ms is not None:
            raise ValueError(f"request {request_id!r} had its first token at {reservation.first_token_ms} ms")
        reservation.first_token_ms = now_ms
        return reservation

    def prefix_arrived(self, request_id: str) -> None:
        """Ends the request's credit. Raises: ValueError if it is not dispatched or was told before."""
        reservation = self._dispatched(request_id)
        if reservation.prefix_arrived:
            raise ValueError(f"the prefix of request {request_id!r} arrived before")
        reservation.prefix_arrived = True
        self._end_credit(reservation)

    def end(self, event: Ended) -> Reservation | None:
        """Releases what the request holds. Returns: its reservation, None if it waited.

        Raises: ValueError if it is unknown, or completed while it waited.
        """
        if event.request_id in self._waiting:
            if event.outcome is Outcome.COMPLETED:
                raise ValueError(f"request {event.request_id!r} waits: it cannot have completed")
            del self._waiting[event.request_id]
            return None
        reservation = self._dispatched(event.request_id)
        del self._reservations[event.request_id]
        self._end_credit(reservation)
        worker = reservation.worker
        worker.in_flight -= 1
        if worker.gone and not worker.in_flight:
            del self._workers[worker.id]
        return reservation

    def _end_credit(self, reservation: Reservation) -> None:
        prefix, reservation.prefix = reservation.prefix, ()
        if reservation.held:
            reservation.worker.credit.remove(prefix)

    def _take_waiting(self, request_id: str) -> Waiting:
        try:
            return self._waiting.pop(request_id)
        except KeyError:
            raise ValueError(f"request {request_id!r} does not wait") from None

    def _dispatched(self, request_id: str) -> Reservation:
        try:
            return self._reservations[request_id]
        except KeyError:
            state = "waits" if request_id in self._waiting else "is unknown or has ended"
            raise ValueError(f"request {request_id!r} is not dispatched: it {state}") from None
