"""What a policy decides with: candidates, the choice among them, or the word that there is no room."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from kvrouting_core.routing.admission import Overload
from kvrouting_core.routing.decision import Candidate, Reason
from kvrouting_core.routing.events import Ended, LoadReport, RoutingRequest
from kvrouting_core.routing.ledger import Reservation, Worker
from kvrouting_core.routing.policy import WorkerBelief


class Choice(NamedTuple):
    """Where a request goes.

    prefix: blocks that the worker will hold beyond the index once the request is prefilled; they are credited to it.
    """

    chosen: Candidate
    reason: Reason
    candidates: tuple[Candidate, ...]
    prefix: Sequence[int] = ()


class Chooser(Protocol):
    """Judges the workers for one request; changes nothing that is reserved."""

    def choose(self, request: RoutingRequest, workers: Sequence[Worker], *, now_ms: float) -> Choice | Overload:
        """workers: those that may be chosen, at least one."""


class Observer(Protocol):
    """Learns from what happens. The ledger has checked each event; a reservation that is not held teaches nothing."""

    def joined(self, worker: Worker, *, anew: bool) -> None:
        """anew: nothing that was known of it holds any more."""

    def left(self, worker: Worker) -> None:
        """It is gone."""

    def reserved(self, reservation: Reservation, chosen: Candidate) -> None:
        """A request was dispatched."""

    def first_token(self, reservation: Reservation, *, now_ms: float) -> None:
        """Its first token came."""

    def ended(self, reservation: Reservation, event: Ended, *, now_ms: float) -> None:
        """It ended."""

    def belief(self, worker: Worker, *, now_ms: float) -> WorkerBelief:
        """What is believed of one worker."""


class ReportReader(Protocol):
    """Updates the worker load from the engine's report."""

    def reported(self, report: LoadReport, *, now_ms: float) -> None:
        """A report of a worker that has joined came."""


def least(candidates: Sequence[Candidate], rng: random.Random, *, key: Callable[[Candidate], float]) -> Candidate:
    """The candidate of least key, ties at random. Raises: ValueError if there is none."""
    keys = list(map(key, candidates))
    lowest = min(keys)
    tied = [c for c, k in zip(candidates, keys, strict=True) if k == lowest]
    return tied[0] if len(tied) == 1 else tied[rng.randrange(len(tied))]


def reason_for(candidates: Sequence[Candidate], reason: Reason) -> Reason:
    """The reason, unless there was no other candidate."""
    return Reason.ONLY_CANDIDATE if len(candidates) == 1 else reason
