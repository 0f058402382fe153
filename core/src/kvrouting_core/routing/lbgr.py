"""`lbgr` in its immediate form: learning-based greedy routing with our corrections, each arrival answered at once."""

from __future__ import annotations

import random
from collections.abc import Sequence
from operator import attrgetter

from kvrouting_core.routing.admission import Admission, Overload
from kvrouting_core.routing.choice import Choice, least, reason_for
from kvrouting_core.routing.decision import Reason
from kvrouting_core.routing.estimator import Price, price_weights
from kvrouting_core.routing.events import RoutingRequest
from kvrouting_core.routing.lbgr_beliefs import LbgrBeliefs
from kvrouting_core.routing.ledger import Worker
from kvrouting_core.routing.parameters import LbgrParameters
from kvrouting_core.routing.policy import CacheView
from kvrouting_core.routing.work_table import WorkTable

_COST = attrgetter("cost_ms")


class Lbgr(LbgrBeliefs):
    """Chooses argmin of E + price: E what the request itself would take, price what it does to others.

    The price counts prefill at the pool's mean speed, see `price_weights`.
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
        super().__init__(parameters, rng=rng)
        self._parameters = parameters
        self._cache = cache
        self._block_size = block_size_tokens
        self._table: WorkTable | None = None
        self._rng = rng
        self._admission = admission

    def choose(self, request: RoutingRequest, workers: Sequence[Worker], *, now_ms: float) -> Choice | Overload:
        """Judges each worker; those past a limit are shown, and not chosen."""
        estimator, table = self.estimator, self._table_of(workers)
        costs = table.estimate_cost(request)
        pool = estimator.pool(table, now_ms=now_ms)
        mu = self.pricing.factor(pool.shortest_queue, pool.busy_share)
        price = Price(mu * price_weights(table.columns, self._parameters), self._parameters.decode_price)
        candidates = estimator.candidates(request, pool, costs, price, table=table, now_ms=now_ms)
        open_ = self._admission.open(candidates, workers)
        if not open_:
            return self._admission.overload(candidates, workers)
        chosen, reason = least(open_, self._rng, key=_COST), reason_for(candidates, Reason.LOWEST_COST)
        newcomer = self.exploration.propose(open_, chosen)
        if newcomer is not None:
            chosen, reason = newcomer, Reason.EXPLORATION
        prefix: Sequence[int] = ()
        if self._parameters.in_flight_credit:
            prefix = request.blocks[costs.held_blocks[candidates.index(chosen)] :]
        return Choice(chosen, reason, tuple(candidates), prefix)

    def _table_of(self, workers: Sequence[Worker]) -> WorkTable:
        if self._table is None or self._table.workers is not workers:
            worker_loads = self.estimator.worker_loads(workers)
            self._table = WorkTable(workers, worker_loads, cache=self._cache, block_size_tokens=self._block_size)
        return self._table
