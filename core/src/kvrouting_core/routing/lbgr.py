"""`lbgr`: learning-based greedy routing with our corrections, in its immediate form."""

from __future__ import annotations

import random
from collections.abc import Sequence
from operator import attrgetter

from kvrouting_core.routing.admission import Admission, Overload
from kvrouting_core.routing.choice import Choice, least, reason_for
from kvrouting_core.routing.decision import Candidate, Reason
from kvrouting_core.routing.estimator import LearnedEstimator, Price
from kvrouting_core.routing.events import Ended, LoadReport, RoutingRequest
from kvrouting_core.routing.exploration import Exploration
from kvrouting_core.routing.ledger import Reservation, Worker
from kvrouting_core.routing.parameters import LbgrParameters
from kvrouting_core.routing.policy import CacheView, WorkerBelief
from kvrouting_core.routing.price import BacklogPrice, ConstantPrice, Pricing

_COST = attrgetter("cost_ms")


class Lbgr:
    """Chooses argmin of E + price: E what the request itself would take, price what it does to others.

    The price counts prefill at the pool's mean speed, so that a slow worker is avoided once, in E, and not twice.
    """

    def __init__(
        self,
        parameters: LbgrParameters,
        *,
        cache: CacheView,
        block_size_tokens: int,
        rng: random.Random,
        admission: Admission,
    ) -> None:
        self._parameters = parameters
        self._cache = cache
        self._rng = rng
        self._admission = admission
        self._estimator = LearnedEstimator(parameters, block_size_tokens=block_size_tokens)
        self._exploration = Exploration(
            share=parameters.exploration_share,
            requests=parameters.exploration_requests,
            extra_ms=parameters.exploration_extra_ms,
            rng=rng,
        )
        self._pricing = _pricing(parameters)

    def choose(self, request: RoutingRequest, workers: Sequence[Worker], *, now_ms: float) -> Choice | Overload:
        """Judges each worker; those past a limit are shown, and not chosen."""
        matched = self._cache.match(request.blocks) if len(request.blocks) else {}
        pool = self._estimator.pool(workers, now_ms=now_ms)
        price = Price(self._pricing.factor(pool), self._parameters.decode_price)
        candidates = self._estimator.candidates(request, pool, matched, price, now_ms=now_ms)
        open_ = self._admission.open(candidates, workers)
        if not open_:
            return self._admission.overload(candidates, workers)
        chosen, reason = least(open_, self._rng, key=_COST), reason_for(candidates, Reason.LOWEST_COST)
        newcomer = self._exploration.propose(open_, chosen)
        if newcomer is not None:
            chosen, reason = newcomer, Reason.EXPLORATION
        prefix: Sequence[int] = ()
        if self._parameters.in_flight_credit:
            prefix = request.blocks[matched.get(chosen.worker, 0) :]
        return Choice(chosen, reason, tuple(candidates), prefix)

    def joined(self, worker: Worker, *, anew: bool) -> None:
        """Starts from the class prior, or goes on with what is known."""
        self._estimator.joined(worker, anew=anew)
        if anew:
            self._exploration.joined(worker.id)

    def left(self, worker: Worker) -> None:
        """Forgets the worker."""
        self._estimator.left(worker)
        self._exploration.left(worker.id)

    def reserved(self, reservation: Reservation, chosen: Candidate) -> None:
        """Counts the request against its worker."""
        self._estimator.reserved(reservation, chosen)
        self._exploration.served(chosen.worker)

    def first_token(self, reservation: Reservation, *, now_ms: float) -> None:
        """The request decodes from now on."""
        self._estimator.first_token(reservation, now_ms=now_ms)

    def ended(self, reservation: Reservation, event: Ended, *, now_ms: float) -> None:
        """Releases the request, and learns from a completed one."""
        self._estimator.ended(reservation, event, now_ms=now_ms)

    def reported(self, report: LoadReport, *, now_ms: float) -> None:
        """Learns speed and others' load."""
        self._estimator.reported(report, now_ms=now_ms)

    def belief(self, worker: Worker, *, now_ms: float) -> WorkerBelief:
        """What is believed of the worker."""
        return self._estimator.belief(worker, now_ms=now_ms)


def _pricing(parameters: LbgrParameters) -> Pricing:
    if isinstance(parameters.price, str):
        return BacklogPrice(parameters.price_floor)
    return ConstantPrice(parameters.price)
