"""Plans the whole line at once: each request is assigned to its best worker, and sent if that one has room.

In order of their keys, requests are assigned to the worker of least cost, and their work is added to its queue as if
they were there. Who is assigned to a worker without room stays, and is planned again at the next event.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from kvrouting_core.routing.choice import Choice, reason_for
from kvrouting_core.routing.decision import Reason
from kvrouting_core.routing.estimator import PoolState, Price, price_weights
from kvrouting_core.routing.lbgr_beliefs import LbgrBeliefs
from kvrouting_core.routing.ledger import Worker
from kvrouting_core.routing.parameters import LbgrParameters
from kvrouting_core.routing.pending_queue import PendingQueue, Queued
from kvrouting_core.routing.policy import CacheView
from kvrouting_core.routing.pool_columns import Vector
from kvrouting_core.routing.release import Release, ReleaseInputs
from kvrouting_core.routing.work_table import NEVER_MS, WorkTable

Send = Callable[[Queued, Choice], None]

_PLANNED_PER_WORKER = 16
# A worker with room that a long plan gave nothing to is no reason to plan again at once: while everybody waits for
# prefixes that others hold, each event of the pool would walk the whole line for it. The longer, the less often.
_LONG_PLAN = 128
_PLANNED_PER_MS = 16.0
# An index that lags by seconds costs next to nothing, so what it said a moment ago is good enough to plan with; a
# request is matched again before it is sent.
MATCH_LASTS_MS = 250.0
_TIE_MS = 1e-6  # rounding decides nothing


class Planner:
    """Assigns; sends by the function it is given, which reserves. match_lasts_ms: how old a match may be in a plan."""

    def __init__(
        self,
        parameters: LbgrParameters,
        beliefs: LbgrBeliefs,
        release: Release,
        *,
        cache: CacheView,
        block_size_tokens: int,
        rng: random.Random,
        match_lasts_ms: float = MATCH_LASTS_MS,
    ) -> None:
        self.parameters = parameters
        self.beliefs = beliefs
        self.release = release
        self.rng = rng
        self.match_lasts_ms = match_lasts_ms
        self._cache = cache
        self._block_size = block_size_tokens
        self._table: WorkTable | None = None
        self.assigned = 0  # requests that were assigned so far, each as often as it was: what planning costs

    def table(self, workers: Sequence[Worker]) -> WorkTable:
        """The workers as they are now. workers: another object whenever one has joined, paused or gone."""
        if self._table is None or self._table.workers is not workers:
            worker_loads = self.beliefs.estimator.worker_loads(workers)
            self._table = WorkTable(workers, worker_loads, cache=self._cache, block_size_tokens=self._block_size)
        return self._table

    def shortest_queue_ms(self, workers: Sequence[Worker], *, now_ms: float) -> float:
        """P of the least loaded worker."""
        return float(self.beliefs.estimator.pool(self.table(workers), now_ms=now_ms).queues_ms.min())

    def estimate_cost(self, item: Queued, pending: PendingQueue, workers: Sequence[Worker], *, now_ms: float) -> None:
        """Matches a request that has just arrived."""
        self.beliefs.estimator.compare(now_ms=now_ms)
        table = self.table(workers)
        table.columns.refresh()
        _estimate_cost(item, pending, table, now_ms=now_ms)

    def estimate_outdated(self, pending: PendingQueue, workers: Sequence[Worker], *, now_ms: float) -> None:
        """Matches those again for whom who may hold their prefix has changed."""
        table = self.table(workers)
        table.columns.refresh()
        for item in pending.outdated():
            _estimate_cost(item, pending, table, now_ms=now_ms)

    def plan(self, pending: PendingQueue, workers: Sequence[Worker], send: Send, *, now_ms: float) -> None:
        """Sends what can go now. workers: those that may be chosen, see `table`."""
        if not len(pending) or not workers:
            return
        estimator = self.beliefs.estimator
        estimator.compare(now_ms=now_ms)
        queue_pressure = math.sqrt(max(1.0, len(pending) / len(workers))) if self.parameters.limit_rises else 1.0
        inputs = ReleaseInputs(estimator.answer_tokens, estimator.mean_uncached_tokens, queue_pressure)
        table = self.table(workers)
        with_capacity = self.release.with_capacity(workers, table.worker_loads, inputs, now_ms=now_ms)
        awaited = [
            worker_index
            for worker_index in with_capacity
            if now_ms >= table.worker_loads[worker_index].unwanted_until_ms
        ]
        if awaited:
            pool = estimator.pool(table, now_ms=now_ms)
            _Plan(self, pending, pool, with_capacity, awaited, inputs, table, now_ms=now_ms).run(send)


def _estimate_cost(item: Queued, pending: PendingQueue, table: WorkTable, *, now_ms: float) -> None:
    """Sets what the request would cost on each worker, the least of it, and its deepest cached block."""
    item.estimated_at_ms = now_ms
    item.costs = costs = table.estimate_cost(item.waiting.request)
    deepest = max(costs.cached_blocks)
    pending.set_deepest(item, item.blocks[deepest - 1] if deepest else None)
    speed = table.columns.speed
    least_ms = float((costs.work_ms * speed).min())
    if least_ms < NEVER_MS * speed.min():  # else all that it may go to are paused
        pending.set_least(item, least_ms)


class _Plan:
    """One pass over the line. rooms: places of who has room. awaited: of those that a pass is worth while for."""

    def __init__(
        self,
        planner: Planner,
        pending: PendingQueue,
        pool: PoolState,
        with_capacity: list[int],
        awaited: list[int],
        inputs: ReleaseInputs,
        table: WorkTable,
        *,
        now_ms: float,
    ) -> None:
        self._planner = planner
        self._pending = pending
        self._pool = pool
        self._with_capacity = with_capacity
        self._awaited = awaited
        self._table = table
        self._now_ms = now_ms
        parameters, columns = planner.parameters, table.columns
        self._inputs = inputs
        self._speed = columns.speed
        self._queue: Vector = pool.queues_ms.copy()
        self._step: Vector = parameters.decode_share * columns.step_ms
        self._steps, self._decode = 0.0, np.zeros_like(self._step)
        # What a ms of prefill at the class prior's speed costs: itself and the decodes it stops; and at price 1.
        self._own_cost: Vector = columns.speed * (1 + parameters.decode_price * pool.batches)
        self._weights = price_weights(columns, parameters)
        self._price_cost: Vector = columns.speed * self._weights
        self._mean_work = columns.prefill_ms(inputs.uncached_tokens)
        self._lengths: Vector = self._queue / self._mean_work
        self._shortest = int(self._lengths.argmin())
        self._behind = len(pending)
        self._cost: Vector = np.empty_like(self._queue)
        self._coefficients: Vector = np.empty_like(self._queue)

    def run(self, send: Send) -> None:
        """Assigns until no worker has room, but for those that nobody wanted a moment ago."""
        planned = self._assign(send)
        self._planner.assigned += planned
        if planned > _LONG_PLAN:
            for worker_index in self._awaited:
                self._table.worker_loads[worker_index].unwanted_until_ms = self._now_ms + planned / _PLANNED_PER_MS

    def _assign(self, send: Send) -> int:
        planned, limit = 0, _PLANNED_PER_WORKER * len(self._queue)
        for item in self._pending.all():
            if planned == limit:
                break
            self._behind -= 1
            if self._now_ms - item.estimated_at_ms > self._planner.match_lasts_ms:
                _estimate_cost(item, self._pending, self._table, now_ms=self._now_ms)
            worker_index = self._cheapest(item)
            if worker_index in self._with_capacity and item.estimated_at_ms < self._now_ms:
                _estimate_cost(item, self._pending, self._table, now_ms=self._now_ms)
                worker_index = self._cheapest(item)
            if item.costs.work_ms[worker_index] >= NEVER_MS:
                continue  # all that it may go to are paused: it must not keep others out of the plan
            planned += 1
            if worker_index in self._with_capacity:
                worker_index = self._send(item, worker_index, send)
                if not self._awaited:
                    break
            self._add(worker_index, item)
        return planned

    def _price(self, item: Queued) -> float | Vector:
        """μ, of each worker where they differ. A ms of this request delays those after it in the line and those who
        arrive until the backlog is gone, so q counts what waits here as well as what the least loaded worker has, of
        whom the plan knows more than an arrival does."""
        behind = self._behind / len(self._queue)
        pricing, sharing = self._planner.beliefs.pricing, self._pending.sharing(item)
        busy = self._pool.busy_share
        match self._planner.parameters.price_queue:
            case "least":
                return pricing.factor(float(self._lengths[self._shortest]) + behind, busy, sharing=sharing)
            case "mean":
                return pricing.factor(float(self._lengths.mean()) + behind, busy, sharing=sharing)
            case "own":
                each = self._lengths.tolist()
                return np.array([pricing.factor(length + behind, busy, sharing=sharing) for length in each])

    def _cheapest(self, item: Queued) -> int:
        """The worker of least cost, by its place; of several, one with room."""
        cost, coefficients = self._cost, self._coefficients
        np.multiply(self._price_cost, self._price(item), out=coefficients)
        coefficients += self._own_cost
        np.multiply(item.costs.work_ms, coefficients, out=cost)
        cost += self._queue
        steps = self._planner.beliefs.estimator.decode_steps(item.waiting.request)
        if steps != self._steps:
            self._steps, self._decode = steps, steps * self._step
        cost += self._decode
        worker_index = int(cost.argmin())
        if worker_index in self._with_capacity:
            return worker_index
        # As good is as good now: nobody waits for a worker beside one that has room and costs the same.
        return next(self._tied(worker_index), worker_index)

    def _tied(self, worker_index: int) -> Iterator[int]:
        """Workers with room that cost no more."""
        highest = self._cost[worker_index] + _TIE_MS
        return (with_capacity for with_capacity in self._with_capacity if self._cost[with_capacity] <= highest)

    def _add(self, worker_index: int, item: Queued) -> None:
        """The request's work is in the worker's queue from now on."""
        self._queue[worker_index] += item.costs.work_ms[worker_index] * self._speed[worker_index]
        self._lengths[worker_index] = self._queue[worker_index] / self._mean_work[worker_index]
        if worker_index == self._shortest:
            self._shortest = int(self._lengths.argmin())

    def _send(self, item: Queued, worker_index: int, send: Send) -> int:
        """Sends the request to one of the cheapest workers with room. Returns: its place."""
        planner, pool, request = self._planner, self._pool, item.waiting.request
        tied = list(self._tied(worker_index))
        if len(tied) > 1:
            worker_index = tied[planner.rng.randrange(len(tied))]
        per_ms = self._price(item) * self._weights
        price = Price(per_ms, planner.parameters.decode_price, planner.parameters.decode_share)
        virtual = pool._replace(queues_ms=self._queue)
        candidates = planner.beliefs.estimator.candidates(
            request, virtual, item.costs, price, table=self._table, now_ms=self._now_ms
        )
        chosen, reason = candidates[worker_index], Reason.LOWEST_COST
        with_capacity = (candidates[p] for p in self._with_capacity if candidates[p].worker not in request.excluded)
        newcomer = planner.beliefs.exploration.propose(with_capacity, chosen)
        if newcomer is not None:
            worker_index, chosen, reason = candidates.index(newcomer), newcomer, Reason.EXPLORATION
        if request.excluded:
            candidates = [c for c in candidates if c.worker not in request.excluded]
        prefix: Sequence[int] = ()
        if planner.parameters.in_flight_credit:
            prefix = request.blocks[item.costs.held_blocks[worker_index] :]
        send(item, Choice(chosen, reason_for(candidates, reason), tuple(candidates), prefix))
        self._look_again(worker_index)
        return worker_index

    def _look_again(self, worker_index: int) -> None:
        """Whether the worker still has room, after one more request."""
        table, has_capacity = self._table, self._planner.release.has_capacity
        if not has_capacity(
            table.workers[worker_index], table.worker_loads[worker_index], self._inputs, now_ms=self._now_ms
        ):
            self._with_capacity.remove(worker_index)
            if worker_index in self._awaited:
                self._awaited.remove(worker_index)
