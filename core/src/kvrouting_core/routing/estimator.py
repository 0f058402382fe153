"""How long a request would take on each worker: s + P + r, learned from what the engines report and from latencies.

Service time: `s = f·(a·u + b·u·(h + u/2)) + d·(m̂ − 1)`; a, b from the prior of the worker's class, f its learned speed,
d the step time of its running decodes, m̂ the expected length of an answer, whose first token the prefill gives.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import repeat
from typing import NamedTuple

import numpy as np

from kvrouting_core.identity import WorkerId
from kvrouting_core.routing.decision import Candidate
from kvrouting_core.routing.engine_reports import pool_speed, speed_factor
from kvrouting_core.routing.events import Ended, LoadReport, Outcome, RoutingRequest
from kvrouting_core.routing.ledger import Reservation, Worker
from kvrouting_core.routing.output_length import OutputLength
from kvrouting_core.routing.parameters import LbgrParameters
from kvrouting_core.routing.policy import WorkerBelief
from kvrouting_core.routing.pool_columns import PoolColumns, Vector
from kvrouting_core.routing.prior import class_prior
from kvrouting_core.routing.queue_load import DecayedQueue, DrainedQueue, QueueLoad, Work
from kvrouting_core.routing.residual import PoolResidual, WorkerResidual, features
from kvrouting_core.routing.running_mean import RunningMean
from kvrouting_core.routing.work_table import RequestCosts, WorkTable
from kvrouting_core.routing.worker_load import WorkerLoad
from kvrouting_core.service_time import StepTimes

_FIRST_UNCACHED_TOKENS = 1024.0
_HIGHEST_BUSY_SHARE = 0.95
# Reports of many workers come close together: comparing all workers costs as much as a decision.
_COMPARED_EVERY_MS = 20.0


class PoolState(NamedTuple):
    """The workers of a table as they are now, in its order, and the pool's backlog.

    queues_ms: P of each. batches: requests that decode on each, ours and others'. shortest_queue: q, P of the least
    loaded worker in requests of mean size. busy_share: ρ, mean share of time that workers spend in prefill, 0 to .95.
    """

    queues_ms: Vector
    batches: Vector
    shortest_queue: float
    busy_share: float


class Price(NamedTuple):
    """What a millisecond of prefill costs others: on each worker, in order, and for each request that decodes there.

    decode_share: how much of its own decode time counts in the choice.
    """

    per_ms: Vector
    per_ms_and_decode: float
    decode_share: float = 1.0


def price_weights(columns: PoolColumns, parameters: LbgrParameters) -> Vector:
    """w: what μ is multiplied by on each worker. At the pool's mean speed a slow worker is avoided once, by its own
    prediction, and not twice; and where a prefix is held counts apart from who is fast."""
    return columns.relative_speed if parameters.price_at_pool_speed else np.ones_like(columns.relative_speed)


class Prediction(NamedTuple):
    """What was predicted for a dispatched request, to be compared with what happens."""

    credited_tokens: int
    uncached_tokens: int
    queue_ms: float
    prefill_ms: float
    step_ms: float
    decode_steps: float


class LearnedEstimator:
    """Beliefs about all workers of a pool."""

    def __init__(self, parameters: LbgrParameters) -> None:
        self._parameters = parameters
        self._worker_loads: dict[WorkerId, WorkerLoad] = {}
        self._predictions: dict[str, Prediction] = {}
        self._output = OutputLength(parameters.initial_output_tokens)
        self._uncached = RunningMean(_FIRST_UNCACHED_TOKENS)
        self._pool_residual = PoolResidual()
        self._corrected = parameters.queue == "drained"
        self._busy_share = 0.0
        self._compared_ms = -math.inf
        self._compared = True

    def pool(self, table: WorkTable, *, now_ms: float) -> PoolState:
        """How loaded the workers are, whatever the request."""
        self.compare(now_ms=now_ms)
        columns = table.columns
        columns.refresh()
        queues_ms, batches = columns.queues_ms(now_ms), columns.running
        others = np.flatnonzero(columns.others_until_ms > now_ms).tolist()
        if others:
            batches = batches.copy()
            for worker_index in others:
                worker_load = table.worker_loads[worker_index]
                batches[worker_index] += worker_load.others.requests
                queues_ms[worker_index] += self._others_ms(worker_load, now_ms)
        mean = self._uncached.value
        shortest = float((queues_ms / (columns.speed * (columns.a + columns.b * (mean / 2)))).min()) / mean
        return PoolState(queues_ms, batches, shortest, self._busy_share)

    def worker_loads(self, workers: Sequence[Worker]) -> list[WorkerLoad]:
        """What is held of each worker."""
        return [self._worker_loads[worker.id] for worker in workers]

    @property
    def answer_tokens(self) -> float:
        """m̂: mean length of an answer."""
        return self._output.mean_tokens

    @property
    def busy_share(self) -> float:
        """ρ: mean share of time that workers spend in prefill, as of the last comparison, 0 to .95."""
        return self._busy_share

    @property
    def mean_uncached_tokens(self) -> float:
        """ū: mean of dispatched uncached tokens."""
        return self._uncached.value

    def candidates(
        self,
        request: RoutingRequest,
        pool: PoolState,
        costs: RequestCosts,
        price: Price,
        *,
        table: WorkTable,
        now_ms: float,
    ) -> list[Candidate]:
        """Each worker's terms for one request, in the order of the table that estimated it."""
        prompt, columns = request.prompt_tokens, table.columns
        columns.refresh()
        matched = credited = costs.cached_tokens
        if costs.cached_blocks is not costs.held_blocks:
            matched = table.reusable_tokens(costs.held_blocks, prompt)
        new = (prompt + request.further_prompt_tokens) - credited
        steps = self.decode_steps(request)
        prefill_ms = columns.speed * costs.work_ms
        service_ms = prefill_ms + steps * columns.step_ms
        queue_ms = pool.queues_ms
        crowded = np.flatnonzero(columns.sequences + request.sequences > columns.running_limit).tolist()
        if crowded:
            queue_ms = queue_ms.copy()
            for worker_index in crowded:
                decode_ms = float(service_ms[worker_index] - prefill_ms[worker_index])
                wait_ms = table.worker_loads[worker_index].slot_wait_ms(request.sequences, decode_ms)
                queue_ms[worker_index] = max(queue_ms[worker_index], wait_ms)
        prediction_ms = service_ms + queue_ms
        residual_ms = np.zeros_like(prediction_ms)
        if self._parameters.residual:
            inputs = zip(table.worker_loads, credited, new, queue_ms, prediction_ms, strict=True)
            residual_ms += [s.residual.value_ms(int(h), int(u), float(q), float(e), now_ms) for s, h, u, q, e in inputs]
            prediction_ms = prediction_ms + residual_ms
        price_ms = prefill_ms * (price.per_ms + price.per_ms_and_decode * pool.batches)
        cost_ms = prediction_ms + price_ms - steps * (1 - price.decode_share) * columns.step_ms
        in_flight = [worker.in_flight for worker in table.workers]
        tokens = [vector.astype(int).tolist() for vector in (matched, credited, new)]
        times = [v.tolist() for v in (service_ms, queue_ms, residual_ms, prediction_ms, price_ms, cost_ms)]
        # `_make` in a loop takes twice as long.
        return list(map(tuple.__new__, repeat(Candidate), zip(table.ids, *tokens, in_flight, *times, strict=True)))

    def _others_ms(self, worker_load: WorkerLoad, now_ms: float) -> float:
        return worker_load.others_ms(now_ms) if self._corrected else 0.0

    def decode_steps(self, request: RoutingRequest) -> float:
        """Expected steps of one answer after its first token."""
        return max(0.0, self._output.expected(request) - 1)

    # Learning

    def joined(self, worker: Worker, *, anew: bool) -> None:
        """Starts from the class prior, or keeps what is known of a worker that was paused."""
        profile = worker.profile
        times = class_prior(profile, self._parameters.default_worker_class)
        worker_load = self._worker_loads.get(worker.id)
        if worker_load is not None and not anew:
            worker_load.adopt(times, profile.scheduler)
        else:
            self._worker_loads[worker.id] = WorkerLoad(
                times=times,
                scheduler=profile.scheduler,
                queue=self._new_queue(profile.scheduler.chunked_prefill_tokens),
                residual=WorkerResidual(self._pool_residual),
            )
        self._compare_pool()

    def _new_queue(self, chunk_tokens: int) -> QueueLoad:
        p = self._parameters
        if p.queue == "decayed":
            return DecayedQueue(factor=p.decay_factor, interval_ms=p.decay_interval_ms)
        return DrainedQueue(chunk_tokens=chunk_tokens)

    def left(self, worker: Worker) -> None:
        """Forgets it."""
        del self._worker_loads[worker.id]
        self._compare_pool()

    def reserved(self, reservation: Reservation, chosen: Candidate) -> None:
        """Puts the request in its worker's queue."""
        request, worker_load = reservation.request, self._worker_loads[chosen.worker]
        work = Work(
            request_id=request.request_id,
            dispatched_ms=reservation.dispatched_ms,
            uncached_tokens=chosen.uncached_tokens,
            prefill_ms=_prefill_ms(worker_load.times, request, chosen.credited_tokens),
            service_ms=chosen.service_ms,
            context_tokens=_context_tokens(request),
            sequences=request.sequences,
        )
        self._predictions[request.request_id] = Prediction(
            chosen.credited_tokens, chosen.uncached_tokens, chosen.queue_ms,
            worker_load.speed * work.prefill_ms, worker_load.step_ms, self.decode_steps(request),
        )  # fmt: skip
        worker_load.add(work)
        self._uncached.learn(chosen.uncached_tokens)

    def first_token(self, reservation: Reservation, *, now_ms: float) -> None:
        """Its prefill is over."""
        if reservation.held:
            self._worker_loads[reservation.worker.id].prefilled(reservation.request.request_id, now_ms=now_ms)

    def ended(self, reservation: Reservation, event: Ended, *, now_ms: float) -> None:
        """Takes the request off; a completed one is compared with its prediction."""
        prediction = self._predictions.pop(event.request_id)
        self._output.learn(event, reservation.request)
        if not reservation.held:
            return
        worker_load = self._worker_loads[reservation.worker.id]
        if event.outcome is Outcome.COMPLETED:
            # An answer that was not streamed shows its first token no sooner.
            worker_load.prefilled(event.request_id, now_ms=now_ms)
            self._compare(worker_load, prediction, reservation, event, now_ms)
        worker_load.remove(event.request_id, now_ms=now_ms)

    def _compare(
        self, worker_load: WorkerLoad, prediction: Prediction, reservation: Reservation, event: Ended, now_ms: float
    ) -> None:
        """The answer's length, which nobody could know, is not held against the worker: its true one is put in."""
        worker_load.observations += 1
        if not self._parameters.residual:
            return
        steps = prediction.decode_steps
        if event.output_tokens is not None:
            steps = max(0.0, event.output_tokens / reservation.request.sequences - 1)
        foreseen_ms = prediction.queue_ms + prediction.prefill_ms + steps * prediction.step_ms
        missed_ms = now_ms - reservation.dispatched_ms - foreseen_ms
        phi = features(prediction.credited_tokens, prediction.uncached_tokens, prediction.queue_ms)
        worker_load.residual.learn(phi, missed_ms, foreseen_ms, now_ms=now_ms)

    def reported(self, report: LoadReport, *, now_ms: float) -> None:
        """Corrects the queue, the others' load and what is measured of the speed."""
        self._worker_loads[report.worker].reported(report, now_ms=now_ms)
        self._compared = False

    def compare(self, *, now_ms: float) -> None:
        """Draws the speeds and ρ from the reports that came since the last time, at most every 20 ms."""
        if not self._compared and now_ms - self._compared_ms >= _COMPARED_EVERY_MS:
            self._compare_pool()
            self._compared, self._compared_ms = True, now_ms

    def _compare_pool(self) -> None:
        """Sets each worker's f, its speed relative to the pool's mean, and ρ."""
        worker_loads = self._worker_loads.values()
        if not worker_loads:
            return
        if self._parameters.learned_speed:
            pool = pool_speed(s.measured for s in worker_loads)
            for worker_load in worker_loads:
                worker_load.set_speed(speed_factor(worker_load.measured, pool))
        rates = [1 / (s.speed * s.a) for s in worker_loads]
        mean = sum(rates) / len(rates)
        for worker_load, rate in zip(worker_loads, rates, strict=True):
            worker_load.set_relative_speed(rate / mean)
        self._busy_share = min(_HIGHEST_BUSY_SHARE, sum(s.busy.value for s in worker_loads) / len(rates))

    def belief(self, worker: Worker, *, now_ms: float) -> WorkerBelief:
        """What is believed of one worker; the residual is that of a request of mean length without cached prefix."""
        self.compare(now_ms=now_ms)
        worker_load = self._worker_loads[worker.id]
        queue_ms = worker_load.queue.load_ms(now_ms, worker_load.speed) + self._others_ms(worker_load, now_ms)
        mean = self._uncached.value
        foreseen_ms = queue_ms + worker_load.speed * worker_load.times.prefill_work_ms(0, mean)
        residual_ms = worker_load.residual.value_ms(0, mean, queue_ms, foreseen_ms, now_ms)
        return WorkerBelief(
            worker=worker.id,
            eligible=worker.eligible,
            in_flight=worker.in_flight,
            queue_ms=queue_ms,
            residual_ms=residual_ms if self._parameters.residual else 0.0,
            prefill_ms_per_token=worker_load.speed * worker_load.times.prefill_ms_per_token,
            speed_factor=worker_load.speed,
            observations=worker_load.observations,
        )


def _prefill_ms(times: StepTimes, request: RoutingRequest, cached_tokens: int) -> float:
    """At the class prior's speed. Further prompts are taken as whole ones of the first one's length."""
    a, b = times.prefill_ms_per_token, times.attention_ms_per_token_pair
    new = request.prompt_tokens - cached_tokens
    work_ms = new * (a + b * (cached_tokens + new / 2))
    if request.further_prompt_tokens:
        work_ms += request.further_prompt_tokens * (a + b * request.prompt_tokens / 2)
    return work_ms


def _context_tokens(request: RoutingRequest) -> int:
    """KV tokens that one decode step reads for all answers: `n` answers each read the prompt, a list each its own."""
    prompt = request.prompt_tokens
    return max(prompt + request.further_prompt_tokens, prompt * request.sequences)
