"""What both forms of `lbgr` know and learn: the estimator, and who gets its share as a newcomer."""

from __future__ import annotations

import random

from kvrouting_core.routing.decision import Candidate
from kvrouting_core.routing.estimator import LearnedEstimator
from kvrouting_core.routing.events import Ended, LoadReport
from kvrouting_core.routing.exploration import Exploration
from kvrouting_core.routing.ledger import Reservation, Worker
from kvrouting_core.routing.parameters import LbgrParameters
from kvrouting_core.routing.policy import WorkerBelief
from kvrouting_core.routing.price import BacklogPrice, ConstantPrice, Pricing


class LbgrBeliefs:
    """Implements `Observer` and `ReportReader`."""

    def __init__(self, parameters: LbgrParameters, *, rng: random.Random) -> None:
        self.estimator = LearnedEstimator(parameters)
        self.exploration = Exploration(
            share=parameters.exploration_share,
            requests=parameters.exploration_requests,
            extra_ms=parameters.exploration_extra_ms,
            rng=rng,
        )
        self.pricing = _pricing(parameters)

    def joined(self, worker: Worker, *, anew: bool) -> None:
        """Starts from the class prior, or goes on with what is known."""
        self.estimator.joined(worker, anew=anew)
        if anew:
            self.exploration.joined(worker.id)

    def left(self, worker: Worker) -> None:
        """Forgets the worker."""
        self.estimator.left(worker)
        self.exploration.left(worker.id)

    def reserved(self, reservation: Reservation, chosen: Candidate) -> None:
        """Counts the request against its worker."""
        self.estimator.reserved(reservation, chosen)
        self.exploration.served(chosen.worker)

    def first_token(self, reservation: Reservation, *, now_ms: float) -> None:
        """The request decodes from now on."""
        self.estimator.first_token(reservation, now_ms=now_ms)

    def ended(self, reservation: Reservation, event: Ended, *, now_ms: float) -> None:
        """Releases the request, and learns from a completed one."""
        self.estimator.ended(reservation, event, now_ms=now_ms)

    def reported(self, report: LoadReport, *, now_ms: float) -> None:
        """Learns speed and others' load."""
        self.estimator.reported(report, now_ms=now_ms)

    def belief(self, worker: Worker, *, now_ms: float) -> WorkerBelief:
        """What is believed of the worker."""
        return self.estimator.belief(worker, now_ms=now_ms)


def _pricing(parameters: LbgrParameters) -> Pricing:
    if isinstance(parameters.price, str):
        return BacklogPrice(parameters.price_floor)
    return ConstantPrice(parameters.price)
