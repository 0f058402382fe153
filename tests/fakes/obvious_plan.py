"""Late binding by its definition: at each event everything is worked out anew, one number after the other."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import numpy as np

from kvrouting_core.identity import WorkerId
from kvrouting_core.routing.admission import Admission
from kvrouting_core.routing.bookkeeping import Bookkeeping
from kvrouting_core.routing.choice import Choice, reason_for
from kvrouting_core.routing.decision import Action, Reason
from kvrouting_core.routing.estimator import Price
from kvrouting_core.routing.events import (
    Arrival,
    Ended,
    Event,
    FirstToken,
    LoadReport,
    PrefixArrived,
    RoutingRequest,
    WorkerGone,
    WorkerJoined,
    WorkerPaused,
)
from kvrouting_core.routing.lbgr_beliefs import LbgrBeliefs
from kvrouting_core.routing.ledger import Waiting, Worker
from kvrouting_core.routing.parameters import LbgrParameters
from kvrouting_core.routing.policy import AdmissionLimits, CacheView
from kvrouting_core.routing.work_table import RequestCosts, WorkTable
from kvrouting_core.routing.worker_load import WorkerLoad


class ObviousPlan:
    """Enough of a policy to be compared with `LatePolicy`: it refuses nothing and explores nothing.

    It shares the learned beliefs with it, and no line of the planning.
    """

    def __init__(
        self, parameters: LbgrParameters, *, cache: CacheView, block_size_tokens: int, rng: random.Random
    ) -> None:
        self.parameters = parameters
        self.cache = cache
        self.block_size = block_size_tokens
        self.rng = rng
        self.beliefs = LbgrBeliefs(parameters, rng=rng)
        self.books = Bookkeeping(
            "obvious",
            admission=Admission(AdmissionLimits()),
            observer=self.beliefs,
            report_reader=self.beliefs,
        )
        self.queue: list[tuple[float, int, Waiting]] = []
        self.arrivals = 0

    def handle(self, event: Event, *, now_ms: float) -> Sequence[Action]:
        match event:
            case Arrival():
                self.arrived(event, now_ms)
            case FirstToken():
                self.books.first_token(event, now_ms=now_ms)
            case Ended():
                if self.books.ended(event, now_ms=now_ms) is None:
                    self.queue = [e for e in self.queue if e[2].request.request_id != event.request_id]
            case LoadReport():
                self.books.reported(event, now_ms=now_ms)
            case PrefixArrived():
                self.books.ledger.prefix_arrived(event.request_id)
                return []
            case WorkerJoined():
                self.books.joined(event)
            case WorkerPaused():
                self.books.ledger.pause(event.worker)
            case WorkerGone():
                self.books.left(event)
        return self.plan(now_ms)

    def arrived(self, arrival: Arrival, now_ms: float) -> None:
        self.arrivals += 1
        waiting = self.books.ledger.arrive(arrival, now_ms=now_ms)
        workers = self.books.ledger.eligible(arrival.request)
        least_ms = min(self.work_ms(waiting.request, worker, self.depth(waiting.request, worker)) for worker in workers)
        key = waiting.arrived_ms + self.parameters.size_precedence * least_ms
        self.queue.append((key, self.arrivals, waiting))
        self.queue.sort(key=lambda entry: entry[:2])

    # What a request would cost

    def depth(self, request: RoutingRequest, worker: Worker) -> int:
        held = self.cache.match(request.blocks).get(worker.id, 0)
        while held < len(request.blocks) and request.blocks[held] in worker.credit.counts:
            held += 1
        return held

    def work_ms(self, request: RoutingRequest, worker: Worker, depth: int) -> float:
        (worker_load,) = self.beliefs.estimator.worker_loads([worker])
        cached, new = self.tokens(request, depth)
        return worker_load.speed * (new * (worker_load.a + worker_load.b * (cached + new / 2)))

    def tokens(self, request: RoutingRequest, depth: int) -> tuple[int, int]:
        """Cached and new ones."""
        cached = min(depth * self.block_size, request.prompt_tokens - 1)
        return cached, request.prompt_tokens - cached

    def deepest(self, request: RoutingRequest, workers: Sequence[Worker]) -> int | None:
        depth = max((self.depth(request, worker) for worker in workers), default=0)
        return request.blocks[depth - 1] if depth else None

    # The plan

    def room(self, worker: Worker, waiting: int, now_ms: float, pool_size: int) -> bool:
        estimator, p = self.beliefs.estimator, self.parameters
        (worker_load,) = estimator.worker_loads([worker])
        if worker_load.queue.load_ms(now_ms, worker_load.speed) >= p.release_ahead_ms:
            return False
        others = worker_load.others.requests if now_ms < worker_load.others.until_ms else 0
        new = estimator.mean_uncached_tokens
        mean_ms = worker_load.speed * new * (worker_load.a + worker_load.b * new / 2)
        share = p.decode_limit * estimator.answer_tokens * worker_load.step_ms / mean_ms
        queue_pressure = math.sqrt(max(1.0, waiting / pool_size)) if p.limit_rises else 1.0
        limit = max(1, math.ceil(share * queue_pressure) - others)
        return worker.in_flight < limit

    def plan(self, now_ms: float) -> list[Action]:
        estimator, p = self.beliefs.estimator, self.parameters
        workers = [w for w in self.books.ledger.workers if w.eligible]
        actions: list[Action] = []
        if not workers:
            return actions
        worker_loads = estimator.worker_loads(workers)
        estimator.compare(now_ms=now_ms)
        queues = [self.load_ms(s, now_ms) for s in worker_loads]
        batches = [s.running + (s.others.requests if now_ms < s.others.until_ms else 0) for s in worker_loads]
        new = estimator.mean_uncached_tokens
        means = [s.speed * new * (s.a + s.b * new / 2) for s in worker_loads]
        steps_ms = [s.step_ms for s in worker_loads]
        length = len(self.queue)
        with_capacity = [self.room(w, length, now_ms, len(workers)) for w in workers]
        entries = self.queue[: 16 * len(workers)]
        for position, entry in enumerate(entries, 1):
            if not any(with_capacity):
                break
            request = entry[2].request
            block = self.deepest(request, workers)
            same = [e for e in self.queue if block is not None and self.deepest(e[2].request, workers) == block]
            lengths = [q / m for q, m in zip(queues, means, strict=True)]
            prices = self.prices(lengths, length - position, worker_loads, len(same))
            decode = p.decode_share * estimator.decode_steps(request)
            works = [self.work_ms(request, w, self.depth(request, w)) for w in workers]
            costs = [
                q + s * (1 + price + p.decode_price * batch) + decode * step
                for q, s, price, batch, step in zip(queues, works, prices, batches, steps_ms, strict=True)
            ]
            worker_index = min(
                range(len(costs)), key=lambda i: (costs[i] > min(costs) + 1e-6, not with_capacity[i], costs[i])
            )
            if with_capacity[worker_index]:
                tied = [i for i, cost in enumerate(costs) if cost <= costs[worker_index] + 1e-6 and with_capacity[i]]
                worker_index = tied[self.rng.randrange(len(tied))] if len(tied) > 1 else worker_index
                self.send(entry, workers, worker_index, prices, now_ms, actions)
                with_capacity[worker_index] = self.room(workers[worker_index], length, now_ms, len(workers))
            queues[worker_index] += works[worker_index]
        return actions

    @staticmethod
    def load_ms(worker_load: WorkerLoad, now_ms: float) -> float:
        """Work before a new request, ours and others'."""
        others_ms = worker_load.others_ms(now_ms) if now_ms < worker_load.others.until_ms else 0.0
        return worker_load.queue.load_ms(now_ms, worker_load.speed) + others_ms

    def prices(
        self, lengths: Sequence[float], behind: int, worker_loads: Sequence[WorkerLoad], sharing: int
    ) -> list[float]:
        """What a ms of work counts for others, on each worker."""
        p = self.parameters
        busy = self.beliefs.estimator.busy_share
        least, mean = min(lengths), sum(lengths) / len(lengths)
        each = {"least": [least] * len(lengths), "mean": [mean] * len(lengths), "own": lengths}
        return [
            self.beliefs.pricing.factor(q + behind / len(lengths), busy, sharing=max(1, sharing))
            * (worker_load.relative_speed if p.price_at_pool_speed else 1.0)
            for q, worker_load in zip(each[p.price_queue], worker_loads, strict=True)
        ]

    def send(
        self,
        entry: tuple[float, int, Waiting],
        workers: Sequence[Worker],
        worker_index: int,
        prices: Sequence[float],
        now_ms: float,
        actions: list[Action],
    ) -> None:
        estimator, request = self.beliefs.estimator, entry[2].request
        matched: dict[WorkerId, int] = dict(self.cache.match(request.blocks))
        worker_loads = estimator.worker_loads(workers)
        table = WorkTable(workers, worker_loads, cache=self.cache, block_size_tokens=self.block_size)
        pool = estimator.pool(table, now_ms=now_ms)
        depths = [self.depth(request, worker) for worker in workers]
        tokens = [self.tokens(request, depth) for depth in depths]
        works = [s.times.prefill_work_ms(*t) for t, s in zip(tokens, worker_loads, strict=True)]
        held, cached = [matched.get(worker.id, 0) for worker in workers], np.array([t[0] for t in tokens])
        costs = RequestCosts(held, depths, cached, np.array(works))
        price = Price(np.array(prices), 0.1, 0.3)
        candidates = estimator.candidates(request, pool, costs, price, table=table, now_ms=now_ms)
        chosen = candidates[worker_index]
        prefix = request.blocks[matched.get(chosen.worker, 0) :]
        self.queue.remove(entry)
        choice = Choice(chosen, reason_for(candidates, Reason.LOWEST_COST), tuple(candidates), prefix)
        actions.append(self.books.dispatch(entry[2], choice, now_ms=now_ms))
