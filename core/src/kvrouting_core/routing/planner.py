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
from kvrouting_core.routing.policy import CacheView
from kvrouting_core.routing.pool_columns import Vector
from kvrouting_core.routing.release import Release, Terms
from kvrouting_core.routing.waiting_line import Queued, WaitingLine
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
            stations = self.beliefs.estimator.stations(workers)
            self._table = WorkTable(workers, stations, cache=self._cache, block_size_tokens=self._block_size)
        return self._table

    def shortest_queue_ms(self, workers: Sequence[Worker], *, now_ms: float) -> float:
        """P of the least loaded worker."""
        return float(self.beliefs.estimator.pool(self.table(workers), now_ms=now_ms).queues_ms.min())

    def weigh(self, item: Queued, line: WaitingLine, workers: Sequence[Worker], *, now_ms: float) -> None:
        """Matches a request that has just arrived."""
        self.beliefs.estimator.compare(now_ms=now_ms)
        table = self.table(workers)
        table.columns.refresh()
        _weigh(item, line, table, now_ms=now_ms)

    def weigh_outdated(self, line: WaitingLine, workers: Sequence[Worker], *, now_ms: float) -> None:
        """Matches those again for whom who may hold their prefix has changed."""
        table = self.table(workers)
        table.columns.refresh()
        for item in line.outdated():
            _weigh(item, line, table, now_ms=now_ms)

    def plan(self, line: WaitingLine, workers: Sequence[Worker], send: Send, *, now_ms: float) -> None:
        """Sends what can go now. workers: those that may be chosen, see `table`."""
        if not len(line) or not workers:
            return
        estimator = self.beliefs.estimator
        estimator.compare(now_ms=now_ms)
        crowding = math.sqrt(max(1.0, len(line) / len(workers))) if self.parameters.limit_rises else 1.0
        terms = Terms(estimator.answer_tokens, estimator.mean_uncached_tokens, crowding)
        table = self.table(workers)
        rooms = self.release.rooms(workers, table.stations, terms, now_ms=now_ms)
        awaited = [place for place in rooms if now_ms >= table.stations[place].unwanted_until_ms]
        if awaited:
            pool = estimator.pool(table, now_ms=now_ms)
            _Plan(self, line, pool, rooms, awaited, terms, table, now_ms=now_ms).run(send)


def _weigh(item: Queued, line: WaitingLine, table: WorkTable, *, now_ms: float) -> None:
    """Sets what the request would cost on each worker, the least of it, and its deepest cached block."""
    item.weighed_ms = now_ms
    item.weighed = weighed = table.weigh(item.waiting.request)
    deepest = max(weighed.cached_blocks)
    line.set_deepest(item, item.blocks[deepest - 1] if deepest else None)
    speed = table.columns.speed
    least_ms = float((weighed.work_ms * speed).min())
    if least_ms < NEVER_MS * speed.min():  # else all that it may go to are paused
        line.set_least(item, least_ms)


class _Plan:
    """One pass over the line. rooms: places of who has room. awaited: of those that a pass is worth while for."""

    def __init__(
        self,
        planner: Planner,
        line: WaitingLine,
        pool: PoolState,
        rooms: list[int],
        awaited: list[int],
        terms: Terms,
        table: WorkTable,
        *,
        now_ms: float,
    ) -> None:
        self._planner = planner
        self._line = line
        self._pool = pool
        self._rooms = rooms
        self._awaited = awaited
        self._table = table
        self._now_ms = now_ms
        parameters, columns = planner.parameters, table.columns
        self._terms = terms
        self._speed = columns.speed
        self._queue: Vector = pool.queues_ms.copy()
        self._step: Vector = parameters.decode_share * columns.step_ms
        self._steps, self._decode = 0.0, np.zeros_like(self._step)
        # What a ms of prefill at the class prior's speed costs: itself and the decodes it stops; and at price 1.
        self._own_cost: Vector = columns.speed * (1 + parameters.decode_price * pool.batches)
        self._weights = price_weights(columns, parameters)
        self._price_cost: Vector = columns.speed * self._weights
        self._mean_work = columns.prefill_ms(terms.uncached_tokens)
        self._lengths: Vector = self._queue / self._mean_work
        self._shortest = int(self._lengths.argmin())
        self._behind = len(line)
        self._cost: Vector = np.empty_like(self._queue)
        self._coefficients: Vector = np.empty_like(self._queue)

    def run(self, send: Send) -> None:
        """Assigns until no worker has room, but for those that nobody wanted a moment ago."""
        planned = self._assign(send)
        self._planner.assigned += planned
        if planned > _LONG_PLAN:
            for place in self._awaited:
                self._table.stations[place].unwanted_until_ms = self._now_ms + planned / _PLANNED_PER_MS

    def _assign(self, send: Send) -> int:
        planned, limit = 0, _PLANNED_PER_WORKER * len(self._queue)
        for item in self._line.all():
            if planned == limit:
                break
            self._behind -= 1
            if self._now_ms - item.weighed_ms > self._planner.match_lasts_ms:
                _weigh(item, self._line, self._table, now_ms=self._now_ms)
            place = self._cheapest(item)
            if place in self._rooms and item.weighed_ms < self._now_ms:
                _weigh(item, self._line, self._table, now_ms=self._now_ms)
                place = self._cheapest(item)
            if item.weighed.work_ms[place] >= NEVER_MS:
                continue  # all that it may go to are paused: it must not keep others out of the plan
            planned += 1
            if place in self._rooms:
                place = self._send(item, place, send)
                if not self._awaited:
                    break
            self._add(place, item)
        return planned

    def _price(self, item: Queued) -> float | Vector:
        """μ, of each worker where they differ. A ms of this request delays those after it in the line and those who
        arrive until the backlog is gone, so q counts what waits here as well as what the least loaded worker has, of
        whom the plan knows more than an arrival does."""
        behind = self._behind / len(self._queue)
        pricing, sharing = self._planner.beliefs.pricing, self._line.sharing(item)
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
        np.multiply(item.weighed.work_ms, coefficients, out=cost)
        cost += self._queue
        steps = self._planner.beliefs.estimator.decode_steps(item.waiting.request)
        if steps != self._steps:
            self._steps, self._decode = steps, steps * self._step
        cost += self._decode
        place = int(cost.argmin())
        if place in self._rooms:
            return place
        # As good is as good now: nobody waits for a worker beside one that has room and costs the same.
        return next(self._tied(place), place)

    def _tied(self, place: int) -> Iterator[int]:
        """Workers with room that cost no more."""
        highest = self._cost[place] + _TIE_MS
        return (with_room for with_room in self._rooms if self._cost[with_room] <= highest)

    def _add(self, place: int, item: Queued) -> None:
        """The request's work is in the worker's queue from now on."""
        self._queue[place] += item.weighed.work_ms[place] * self._speed[place]
        self._lengths[place] = self._queue[place] / self._mean_work[place]
        if place == self._shortest:
            self._shortest = int(self._lengths.argmin())

    def _send(self, item: Queued, place: int, send: Send) -> int:
        """Sends the request to one of the cheapest workers with room. Returns: its place."""
        planner, pool, request = self._planner, self._pool, item.waiting.request
        tied = list(self._tied(place))
        if len(tied) > 1:
            place = tied[planner.rng.randrange(len(tied))]
        per_ms = self._price(item) * self._weights
        price = Price(per_ms, planner.parameters.decode_price, planner.parameters.decode_share)
        virtual = pool._replace(queues_ms=self._queue)
        candidates = planner.beliefs.estimator.candidates(
            request, virtual, item.weighed, price, table=self._table, now_ms=self._now_ms
        )
        chosen, reason = candidates[place], Reason.LOWEST_COST
        with_room = (candidates[p] for p in self._rooms if candidates[p].worker not in request.excluded)
        newcomer = planner.beliefs.exploration.propose(with_room, chosen)
        if newcomer is not None:
            place, chosen, reason = candidates.index(newcomer), newcomer, Reason.EXPLORATION
        if request.excluded:
            candidates = [c for c in candidates if c.worker not in request.excluded]
        prefix: Sequence[int] = ()
        if planner.parameters.in_flight_credit:
            prefix = request.blocks[item.weighed.held_blocks[place] :]
        send(item, Choice(chosen, reason_for(candidates, reason), tuple(candidates), prefix))
        self._look_again(place)
        return place

    def _look_again(self, place: int) -> None:
        """Whether the worker still has room, after one more request."""
        table, has_room = self._table, self._planner.release.has_room
        if not has_room(table.workers[place], table.stations[place], self._terms, now_ms=self._now_ms):
            self._rooms.remove(place)
            if place in self._awaited:
                self._awaited.remove(place)
