"""How long a request would take on each worker: s + P + r, learned from what the engines report and from latencies.

Service time: `s = f·(a·u + b·u·(h + u/2)) + d·(m̂ − 1)`; a, b from the prior of the worker's class, f its learned speed,
d the step time of its running decodes, m̂ the expected length of an answer, whose first token the prefill gives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kvrouting_core.identity import WorkerId
from kvrouting_core.routing.decision import Candidate
from kvrouting_core.routing.engine_reports import pool_speed, speed_factor
from kvrouting_core.routing.events import Ended, LoadReport, Outcome, RoutingRequest
from kvrouting_core.routing.ledger import Reservation, Worker
from kvrouting_core.routing.output_length import OutputLength
from kvrouting_core.routing.parameters import LbgrParameters
from kvrouting_core.routing.policy import WorkerBelief
from kvrouting_core.routing.prior import class_prior
from kvrouting_core.routing.queue_load import DecayedQueue, DrainedQueue, QueueLoad, Work
from kvrouting_core.routing.residual import PoolResidual, WorkerResidual, features
from kvrouting_core.routing.running_mean import RunningMean
from kvrouting_core.routing.station import Station
from kvrouting_core.service_time import StepTimes

_FIRST_UNCACHED_TOKENS = 1024.0
_HIGHEST_BUSY_SHARE = 0.95


class Estimate(NamedTuple):
    """What one worker would need for one request. prefill_ms and decode_ms make up s."""

    worker: Worker
    station: Station
    matched_tokens: int
    credited_tokens: int
    uncached_tokens: int
    prefill_ms: float
    decode_ms: float
    queue_ms: float
    residual_ms: float


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

    def __init__(self, parameters: LbgrParameters, *, block_size_tokens: int) -> None:
        self._parameters = parameters
        self._block_size = block_size_tokens
        self._stations: dict[WorkerId, Station] = {}
        self._predictions: dict[str, Prediction] = {}
        self._output = OutputLength(parameters.initial_output_tokens)
        self._uncached = RunningMean(_FIRST_UNCACHED_TOKENS)
        self._pool_residual = PoolResidual()
        self._corrected = parameters.queue == "drained"

    def estimates(
        self, request: RoutingRequest, workers: Sequence[Worker], matched: Mapping[WorkerId, int], *, now_ms: float
    ) -> list[Estimate]:
        """One estimate per worker, in their order. matched: leading blocks that the index reports."""
        steps = self._decode_steps(request)
        stations = self._stations
        return [
            self._estimate(request, worker, stations[worker.id], matched.get(worker.id, 0), steps, now_ms)
            for worker in workers
        ]

    def _estimate(
        self,
        request: RoutingRequest,
        worker: Worker,
        station: Station,
        held: int,
        decode_steps: float,
        now_ms: float,
    ) -> Estimate:
        size, most = self._block_size, request.prompt_tokens - 1
        known = cached = min(held * size, most)
        if worker.credit:
            cached = min(worker.credit.depth(request.blocks, held) * size, most)
        prefill_ms = station.speed * _prefill_ms(station.times, request, cached)
        decode_ms = decode_steps * station.step_ms
        queue_ms = self._queue_ms(station, request, decode_steps, now_ms)
        uncached = request.prompt_tokens - cached + request.further_prompt_tokens
        residual_ms = 0.0
        if self._parameters.residual:
            phi = features(cached, uncached, queue_ms)
            residual_ms = station.residual.value_ms(phi, prefill_ms + decode_ms + queue_ms, now_ms=now_ms)
        return Estimate(worker, station, known, cached, uncached, prefill_ms, decode_ms, queue_ms, residual_ms)

    def _queue_ms(self, station: Station, request: RoutingRequest, decode_steps: float, now_ms: float) -> float:
        own_ms = station.queue.load_ms(now_ms=now_ms, speed=station.speed)
        if not self._corrected:
            return own_ms
        prefill_ms = own_ms + station.others_ms(now_ms=now_ms)
        limit = station.running_limit
        excess = station.sequences + station.others(now_ms=now_ms) + request.sequences - limit
        if excess <= 0:
            return prefill_ms
        # So many must end first; with `limit` in the batch, one ends every steps·step/limit ms.
        return max(prefill_ms, excess * decode_steps * station.step_ms / limit)

    def _decode_steps(self, request: RoutingRequest) -> float:
        return max(0.0, self._output.expected(request) - 1)

    @property
    def busy_share(self) -> float:
        """ρ: mean share of time in prefill, over the workers; at most .95."""
        stations = self._stations.values()
        if not stations:
            return 0.0
        return min(_HIGHEST_BUSY_SHARE, sum(s.busy.value for s in stations) / len(stations))

    def shortest_queue(self, estimates: Sequence[Estimate]) -> float:
        """Requests of mean size that wait on the least loaded worker: min of P over a mean request's prefill."""
        mean = self._uncached.value
        return min(e.queue_ms / (e.station.speed * e.station.times.prefill_work_ms(0, mean)) for e in estimates)

    # Learning

    def joined(self, worker: Worker, *, anew: bool) -> None:
        """Starts from the class prior, or keeps what is known of a worker that was paused."""
        profile = worker.profile
        times = class_prior(profile, self._parameters.default_worker_class)
        station = self._stations.get(worker.id)
        if station is not None and not anew:
            station.adopt(times, profile.scheduler)
        else:
            self._stations[worker.id] = Station(
                times=times,
                scheduler=profile.scheduler,
                queue=self._new_queue(profile.scheduler.chunked_prefill_tokens),
                residual=WorkerResidual(self._pool_residual),
            )
        self._set_speeds()

    def _new_queue(self, chunk_tokens: int) -> QueueLoad:
        p = self._parameters
        if p.queue == "decayed":
            return DecayedQueue(factor=p.decay_factor, interval_ms=p.decay_interval_ms)
        return DrainedQueue(chunk_tokens=chunk_tokens)

    def left(self, worker: Worker) -> None:
        """Forgets it."""
        del self._stations[worker.id]
        self._set_speeds()

    def reserved(self, reservation: Reservation, chosen: Candidate) -> None:
        """Puts the request in its worker's queue."""
        request, station = reservation.request, self._stations[chosen.worker]
        work = Work(
            request_id=request.request_id,
            dispatched_ms=reservation.dispatched_ms,
            uncached_tokens=chosen.uncached_tokens,
            prefill_ms=_prefill_ms(station.times, request, chosen.credited_tokens),
            service_ms=chosen.service_ms,
            context_tokens=_context_tokens(request),
            sequences=request.sequences,
        )
        self._predictions[request.request_id] = Prediction(
            chosen.credited_tokens, chosen.uncached_tokens, chosen.queue_ms,
            station.speed * work.prefill_ms, station.step_ms, self._decode_steps(request),
        )  # fmt: skip
        station.add(work)
        self._uncached.learn(chosen.uncached_tokens)

    def first_token(self, reservation: Reservation, *, now_ms: float) -> None:
        """Its prefill is over."""
        if reservation.held:
            self._stations[reservation.worker.id].prefilled(reservation.request.request_id, now_ms=now_ms)

    def ended(self, reservation: Reservation, event: Ended, *, now_ms: float) -> None:
        """Takes the request off; a completed one is compared with its prediction."""
        prediction = self._predictions.pop(event.request_id)
        self._output.learn(event, reservation.request)
        if not reservation.held:
            return
        station = self._stations[reservation.worker.id]
        if event.outcome is Outcome.COMPLETED:
            # An answer that was not streamed shows its first token no sooner.
            station.prefilled(event.request_id, now_ms=now_ms)
            self._compare(station, prediction, reservation, event, now_ms)
        station.remove(event.request_id, now_ms=now_ms)

    def _compare(
        self, station: Station, prediction: Prediction, reservation: Reservation, event: Ended, now_ms: float
    ) -> None:
        """The answer's length, which nobody could know, is not held against the worker: its true one is put in."""
        station.observations += 1
        steps = prediction.decode_steps
        if event.output_tokens is not None:
            steps = max(0.0, event.output_tokens / reservation.request.sequences - 1)
        foreseen_ms = prediction.queue_ms + prediction.prefill_ms + steps * prediction.step_ms
        missed_ms = now_ms - reservation.dispatched_ms - foreseen_ms
        phi = features(prediction.credited_tokens, prediction.uncached_tokens, prediction.queue_ms)
        station.residual.learn(phi, missed_ms, foreseen_ms, now_ms=now_ms)

    def reported(self, report: LoadReport, *, now_ms: float) -> None:
        """Corrects the queue, the others' load and the speed."""
        if self._stations[report.worker].reported(report, now_ms=now_ms):
            self._set_speeds()

    def _set_speeds(self) -> None:
        stations = self._stations.values()
        if not stations:
            return
        pool = pool_speed(s.measured for s in stations) if self._parameters.learned_speed else 1.0
        for station in stations:
            learned = self._parameters.learned_speed
            station.speed = speed_factor(station.measured, pool) if learned else 1.0
        rates = [1 / (s.speed * s.times.prefill_ms_per_token) for s in stations]
        mean = sum(rates) / len(rates)
        for station, rate in zip(stations, rates, strict=True):
            station.relative_speed = rate / mean

    def belief(self, worker: Worker, *, now_ms: float) -> WorkerBelief:
        """What is believed of one worker; the residual is that of a request of mean length without cached prefix."""
        station = self._stations[worker.id]
        queue_ms = station.queue.load_ms(now_ms=now_ms, speed=station.speed)
        if self._corrected:
            queue_ms += station.others_ms(now_ms=now_ms)
        mean = self._uncached.value
        prediction_ms = queue_ms + station.speed * station.times.prefill_work_ms(0, mean)
        phi = features(0, mean, queue_ms)
        return WorkerBelief(
            worker=worker.id,
            eligible=worker.eligible,
            in_flight=worker.in_flight,
            queue_ms=queue_ms,
            residual_ms=(
                station.residual.value_ms(phi, prediction_ms, now_ms=now_ms) if self._parameters.residual else 0.0
            ),
            prefill_ms_per_token=station.speed * station.times.prefill_ms_per_token,
            speed_factor=station.speed,
            observations=station.observations,
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
