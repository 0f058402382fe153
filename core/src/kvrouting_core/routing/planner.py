"""Plans the whole line at once: each request is assigned to its best worker, and sent if that one has room.

In order of their keys, requests are assigned to the worker of least cost, and their work is added to its queue as if
they were there. Who is assigned to a worker without room stays, and is planned again at the next event.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import numpy as np

from kvrouting_core.routing.choice import Choice, reason_for
from kvrouting_core.routing.decision import Reason
from kvrouting_core.routing.estimator import PoolState, Price, price_weights
from kvrouting_core.routing.lbgr_beliefs import LbgrBeliefs
from kvrouting_core.routing.ledger import Worker
from kvrouting_core.routing.parameters import LbgrParameters
from kvrouting_core.routing.policy import CacheView
from kvrouting_core.routing.release import Release, Terms
from kvrouting_core.routing.waiting_line import Queued, WaitingLine
from kvrouting_core.routing.work_table import NEVER_MS, Vector, WorkTable

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
        self._comparisons = 0
        self.assigned = 0  # requests that were assigned so far, each as often as it was: what planning costs

    def table(self, workers: Sequence[Worker]) -> WorkTable:
        """The workers as they are now. workers: another object whenever one has joined, paused or gone."""
        if self._table is None or self._table.workers is not workers:
            stations = self.beliefs.estimator.stations(workers)
            self._table = WorkTable(workers, stations, cache=self._cache, block_size_tokens=self._block_size)
        elif self._comparisons != self.beliefs.estimator.comparisons:
            self._table.learn()
        self._comparisons = self.beliefs.estimator.comparisons
        return self._table

    def weigh(self, item: Queued, line: WaitingLine, workers: Sequence[Worker], *, now_ms: float) -> None:
        """Matches a request that has just arrived."""
        self.beliefs.estimator.compare(now_ms=now_ms)
        _weigh(item, line, self.table(workers), now_ms=now_ms)

    def weigh_outdated(self, line: WaitingLine, workers: Sequence[Worker], *, now_ms: float) -> None:
        """Matches those again for whom who may hold their prefix has changed."""
        table = self.table(workers)
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
        if not any(rooms):
            return
        awaited = [room and now_ms >= s.unwanted_until_ms for room, s in zip(rooms, table.stations, strict=True)]
        if any(awaited):
            pool = estimator.pool(workers, now_ms=now_ms)
            _Plan(self, line, pool, rooms, awaited, terms, table, now_ms=now_ms).run(send)


def _weigh(item: Queued, line: WaitingLine, table: WorkTable, *, now_ms: float) -> None:
    """Sets what the request would cost on each worker, the least of it, and its deepest cached block."""
    item.weighed_ms = now_ms
    item.weighed = weighed = table.weigh(item.waiting.request)
    deepest = max(weighed.cached_blocks)
    line.set_deepest(item, item.blocks[deepest - 1] if deepest else None)
    least_ms = float((weighed.work_ms * table.speeds).min())
    if least_ms < NEVER_MS * table.speeds.min():  # else all that it may go to are paused
        line.set_least(item, least_ms)


class _Plan:
    """One pass over the line. rooms: who has room. awaited: who has room that a pass is worth while for."""

    def __init__(
        self,
        planner: Planner,
        line: WaitingLine,
        pool: PoolState,
        rooms: list[bool],
        awaited: list[bool],
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
        parameters, stations = planner.parameters, pool.stations
        self._terms = terms
        self._speed = table.speeds
        self._queue: Vector = np.array(pool.queues_ms)
        self._decode: Vector = parameters.decode_share * np.array([station.step_ms for station in stations])
        # What a ms of prefill at the class prior's speed costs: itself and the decodes it stops; and at price 1.
        self._own_cost = self._speed * (1 + parameters.decode_price * np.array(pool.batches))
        self._weights: Vector = np.array(price_weights(pool, parameters))
        self._price_cost = self._speed * self._weights
        new = terms.uncached_tokens
        self._mean_work: Vector = np.array([station.mean_work_ms(new) for station in stations])
        self._lengths: Vector = self._queue / self._mean_work
        self._shortest = int(self._lengths.argmin())
        self._behind = len(line)
        self._cost: Vector = np.empty(len(stations))
        self._coefficients: Vector = np.empty(len(stations))

    def run(self, send: Send) -> None:
        """Assigns until no worker has room, but for those that nobody wanted a moment ago."""
        planned = self._assign(send)
        self._planner.assigned += planned
        if planned > _LONG_PLAN:
            for room, station in zip(self._awaited, self._pool.stations, strict=True):
                if room:
                    station.unwanted_until_ms = self._now_ms + planned / _PLANNED_PER_MS

    def _assign(self, send: Send) -> int:
        planned, limit = 0, _PLANNED_PER_WORKER * len(self._rooms)
        for item in self._line.all():
            if planned == limit:
                break
            self._behind -= 1
            if self._now_ms - item.weighed_ms > self._planner.match_lasts_ms:
                _weigh(item, self._line, self._table, now_ms=self._now_ms)
            place = self._cheapest(item)
            if self._rooms[place] and item.weighed_ms < self._now_ms:
                _weigh(item, self._line, self._table, now_ms=self._now_ms)
                place = self._cheapest(item)
            if item.weighed.work_ms[place] >= NEVER_MS:
                continue  # all that it may go to are paused: it must not keep others out of the plan
            planned += 1
            if self._rooms[place]:
                place = self._send(item, place, send)
                if not any(self._awaited):
                    break
            self._add(place, item)
        return planned

    def _price(self, item: Queued) -> float | Vector:
        """μ, of each worker where they differ. A ms of this request delays those after it in the line and those who
        arrive until the backlog is gone, so q counts what waits here as well as what the least loaded worker has, of
        whom the plan knows more than an arrival does."""
        behind = self._behind / len(self._rooms)
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
        if steps:
            cost += steps * self._decode
        place = int(cost.argmin())
        if self._rooms[place]:
            return place
        # As good is as good now: nobody waits for a worker beside one that has room and costs the same.
        tied = (int(p) for p in np.flatnonzero(cost <= cost[place] + _TIE_MS) if self._rooms[p])
        return next(tied, place)

    def _add(self, place: int, item: Queued) -> None:
        """The request's work is in the worker's queue from now on."""
        self._queue[place] += item.weighed.work_ms[place] * self._speed[place]
        self._lengths[place] = self._queue[place] / self._mean_work[place]
        if place == self._shortest:
            self._shortest = int(self._lengths.argmin())

    def _send(self, item: Queued, place: int, send: Send) -> int:
        """Sends the request to one of the cheapest workers with room. Returns: its place."""
        planner, pool, request = self._planner, self._pool, item.waiting.request
        tied = [int(p) for p in np.flatnonzero(self._cost <= self._cost[place] + _TIE_MS) if self._rooms[p]]
        if len(tied) > 1:
            place = tied[planner.rng.randrange(len(tied))]
        per_ms = (self._price(item) * self._weights).tolist()
        price = Price(per_ms, planner.parameters.decode_price, planner.parameters.decode_share)
        virtual = pool._replace(queues_ms=self._queue.tolist())
        candidates = planner.beliefs.estimator.candidates(
            request, virtual, item.weighed, price, table=self._table, now_ms=self._now_ms
        )
        chosen, reason = candidates[place], Reason.LOWEST_COST
        with_room = [
            c
            for c, w, room in zip(candidates, pool.workers, self._rooms, strict=True)
            if room and w.id not in request.excluded
        ]
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
        self._rooms[place] = self._awaited[place] = self._planner.release.has_room(
            self._pool.workers[place], self._pool.stations[place], self._terms, now_ms=self._now_ms
        )
