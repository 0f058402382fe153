"""`lbgr-paper`: LBGR as the paper's text defines it (arXiv 2601.18999), with the constants of its code.

s = α_cached·h + α_miss·u + o; P += s on dispatch, P ← ρ·P every Δt, less what is left of s on completion;
Ê = s + P + θᵀφ(h, u, P); choose argmin Ê; one online step on θ for (E − Ê)² when the latency E is seen.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from kvrouting_core.identity import WorkerId
from kvrouting_core.routing.admission import Admission, Overload
from kvrouting_core.routing.choice import Choice, least, reason_for
from kvrouting_core.routing.decision import Candidate, Reason
from kvrouting_core.routing.events import Ended, Outcome, RoutingRequest
from kvrouting_core.routing.ledger import Reservation, Worker
from kvrouting_core.routing.output_length import OutputLength
from kvrouting_core.routing.parameters import PaperParameters
from kvrouting_core.routing.policy import CacheView, WorkerBelief
from kvrouting_core.routing.prior import class_prior
from kvrouting_core.routing.queue_load import DecayedQueue, Work
from kvrouting_core.routing.residual import GradientRegression, dot, features
from kvrouting_core.service_time import StepTimes


class _PaperWorker:
    __slots__ = ("queue", "residual", "times")

    def __init__(self, times: StepTimes, queue: DecayedQueue, residual: GradientRegression) -> None:
        self.times = times
        self.queue = queue
        self.residual = residual


class PaperLbgr:
    """Chooses argmin Ê, ties at random."""

    def __init__(
        self,
        parameters: PaperParameters,
        *,
        cache: CacheView,
        block_size_tokens: int,
        rng: random.Random,
        admission: Admission,
    ) -> None:
        self._parameters = parameters
        self._cache = cache
        self._block_size = block_size_tokens
        self._rng = rng
        self._admission = admission
        self._output = OutputLength(parameters.initial_output_tokens)
        self._workers: dict[WorkerId, _PaperWorker] = {}
        self._predictions: dict[str, Candidate] = {}

    def choose(self, request: RoutingRequest, workers: Sequence[Worker], *, now_ms: float) -> Choice | Overload:
        """Predicts for each worker; those past a limit are shown, and not chosen."""
        matched = self._cache.match(request.blocks) if len(request.blocks) else {}
        candidates = tuple(self._predicted(request, w, matched.get(w.id, 0), now_ms) for w in workers)
        open_ = self._admission.open(candidates, workers)
        if not open_:
            return self._admission.overload(candidates, workers)
        chosen = least(open_, self._rng, key=lambda c: c.prediction_ms)
        prefix = request.blocks[matched.get(chosen.worker, 0) :]
        return Choice(chosen, reason_for(candidates, Reason.LOWEST_COST), candidates, prefix)

    def _predicted(self, request: RoutingRequest, worker: Worker, held: int, now_ms: float) -> Candidate:
        known, prompt = self._workers[worker.id], request.prompt_tokens
        cached = worker.reusable_tokens(worker.credit.depth(request.blocks, held) * self._block_size, prompt)
        uncached = request.prompt_tokens - cached + request.further_prompt_tokens
        answer_ms = request.sequences * self._output.expected(request) * known.times.decode_ms(1, 0)
        service_ms = (
            self._parameters.cached_ms_per_token * cached + known.times.prefill_ms_per_token * uncached + answer_ms
        )
        queue_ms = known.queue.load_ms(now_ms, 1.0)
        residual_ms = dot(known.residual.weights, features(cached, uncached, queue_ms))
        prediction_ms = service_ms + queue_ms + residual_ms
        return Candidate(
            worker=worker.id,
            matched_tokens=worker.reusable_tokens(held * self._block_size, prompt),
            credited_tokens=cached,
            uncached_tokens=uncached,
            in_flight=worker.in_flight,
            service_ms=service_ms,
            queue_ms=queue_ms,
            residual_ms=residual_ms,
            prediction_ms=prediction_ms,
            price_ms=0.0,
            cost_ms=prediction_ms,
        )

    def joined(self, worker: Worker, *, anew: bool) -> None:
        """Starts from the class prior; what a paused worker had learned stays."""
        times = class_prior(worker.profile, self._parameters.default_worker_class)
        if anew:
            p = self._parameters
            queue = DecayedQueue(factor=p.decay_factor, interval_ms=p.decay_interval_ms)
            self._workers[worker.id] = _PaperWorker(times, queue, GradientRegression(p.learning_rate))
        self._workers[worker.id].times = times

    def left(self, worker: Worker) -> None:
        """Forgets the worker."""
        del self._workers[worker.id]

    def reserved(self, reservation: Reservation, chosen: Candidate) -> None:
        """P += s."""
        request = reservation.request
        self._predictions[request.request_id] = chosen
        work = Work(
            request_id=request.request_id,
            dispatched_ms=reservation.dispatched_ms,
            uncached_tokens=chosen.uncached_tokens,
            prefill_ms=chosen.service_ms,
            service_ms=chosen.service_ms,
            context_tokens=request.prompt_tokens,
            sequences=request.sequences,
        )
        self._workers[chosen.worker].queue.add(work)

    def first_token(self, reservation: Reservation, *, now_ms: float) -> None:
        """The paper counts a request until it completes: only its queue's clock moves."""
        if reservation.held:
            queue = self._workers[reservation.worker.id].queue
            queue.prefilled(reservation.request.request_id, now_ms=now_ms)

    def ended(self, reservation: Reservation, event: Ended, *, now_ms: float) -> None:
        """Takes off what is left of s; a completed request gives one step on θ."""
        predicted = self._predictions.pop(event.request_id)
        self._output.learn(event, reservation.request)
        if not reservation.held:
            return
        known = self._workers[reservation.worker.id]
        known.queue.remove(event.request_id, now_ms=now_ms)
        if event.outcome is Outcome.COMPLETED:
            phi = features(predicted.credited_tokens, predicted.uncached_tokens, predicted.queue_ms)
            latency_ms = now_ms - reservation.dispatched_ms
            known.residual.learn(phi, latency_ms - predicted.service_ms - predicted.queue_ms)

    def belief(self, worker: Worker, *, now_ms: float) -> WorkerBelief:
        """The residual is its constant term."""
        known = self._workers[worker.id]
        return WorkerBelief(
            worker=worker.id,
            eligible=worker.eligible,
            in_flight=worker.in_flight,
            queue_ms=known.queue.load_ms(now_ms, 1.0),
            residual_ms=known.residual.weights[0],
            prefill_ms_per_token=known.times.prefill_ms_per_token,
            speed_factor=1.0,
            observations=known.residual.observations,
        )
