"""`lbgr-released`: what the code published with the paper does. For comparison in experiments only.

It differs from the paper's text: lengths are characters of the prompt, a millisecond each; prefixes are those of the
router's own tree, which no eviction reaches; the learned term is one bias per worker, never below 1 ms. Written from a
description of its behaviour, not from its source.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvrouting_core.identity import WorkerId
from kvrouting_core.routing.admission import Admission, Overload
from kvrouting_core.routing.choice import Choice, reason_for
from kvrouting_core.routing.decision import Candidate, Reason
from kvrouting_core.routing.events import Ended, Outcome, RoutingRequest
from kvrouting_core.routing.ledger import Reservation, Worker
from kvrouting_core.routing.policy import WorkerBelief
from kvrouting_core.routing.router_text import MEAN_CHARACTERS, PromptText, RoutedTexts, SimulatedText

_TICK_MS = 20.0
_DECAY = 31 / 32
_CLEARLY_LESS = 1.0  # a later worker wins only by more than this
_FORGETTING = 0.992
_FIRST_VARIANCE = 1e6


class WholeQueue:
    """W: whole milliseconds, ×31/32 at each tick of 20 ms, rounded down."""

    __slots__ = ("_ticks", "_value")

    def __init__(self) -> None:
        self._value = 0
        self._ticks = 0

    def at(self, now_ms: float) -> int:
        """W now."""
        ticks = int(now_ms // _TICK_MS)
        for _ in range(ticks - self._ticks):
            if not self._value:
                break
            self._value = int(self._value * _DECAY)
        self._ticks = max(ticks, self._ticks)
        return self._value

    def add(self, base: int, *, now_ms: float) -> None:
        """A request was dispatched."""
        self._value = self.at(now_ms) + base

    def take_off(self, base: int, *, elapsed_ms: float, now_ms: float) -> None:
        """A request ended: what is left of it goes, as if nothing had been rounded on the way."""
        self._value = max(0, self.at(now_ms) - int(base * _DECAY ** (elapsed_ms / _TICK_MS)))


class Bias:
    """θ: recursive least squares on the feature 1, never below 1."""

    __slots__ = ("_estimate", "_variance", "observations")

    def __init__(self) -> None:
        self._estimate = 0.0
        self._variance = _FIRST_VARIANCE
        self.observations = 0

    @property
    def value(self) -> float:
        """In ms; 0 before the first observation."""
        return self._estimate

    def learn(self, missed_ms: float) -> None:
        """missed_ms: latency less base and queue at routing; less than 1 counts as 1."""
        gain = self._variance / (_FORGETTING + self._variance)
        self._estimate += gain * (max(1.0, missed_ms) - self._estimate)
        self._variance = gain
        self.observations += 1


class _Sent(NamedTuple):
    text: PromptText
    base: int
    queue: int


class _ReleasedWorker:
    __slots__ = ("bias", "queue", "texts")

    def __init__(self) -> None:
        self.texts = RoutedTexts()
        self.queue = WholeQueue()
        self.bias = Bias()


class ReleasedLbgr:
    """Chooses the first worker, in order of joining, that no later one beats by more than 1 ms."""

    def __init__(self, *, block_size_tokens: int, admission: Admission) -> None:
        self._block_size = block_size_tokens
        self._text = SimulatedText(block_size_tokens)
        self._admission = admission
        self._workers: dict[WorkerId, _ReleasedWorker] = {}
        self._judged: PromptText | None = None
        self._sent: dict[str, _Sent] = {}

    def choose(self, request: RoutingRequest, workers: Sequence[Worker], *, now_ms: float) -> Choice | Overload:
        """score = max(1, base + W + θ). The terms of a candidate are in the code's ms, one a character."""
        text = self._judged = self._text.prompt(request.blocks, request.prompt_tokens)
        candidates = tuple(self._scored(request, text, worker, now_ms) for worker in workers)
        open_ = self._admission.open(candidates, workers)
        if not open_:
            return self._admission.overload(candidates, workers)
        best = open_[0]
        for candidate in open_[1:]:
            if best.cost_ms - candidate.cost_ms > _CLEARLY_LESS:
                best = candidate
        return Choice(best, reason_for(candidates, Reason.LOWEST_COST), candidates)

    def _scored(self, request: RoutingRequest, text: PromptText, worker: Worker, now_ms: float) -> Candidate:
        known = self._workers[worker.id]
        matched = known.texts.matched_blocks(text)
        held = worker.reusable_tokens(matched * self._block_size, request.prompt_tokens)
        base = max(1, text.total - text.lengths[matched])
        queue, bias = known.queue.at(now_ms), known.bias.value
        score = max(1.0, base + queue + bias)
        uncached = request.prompt_tokens - held + request.further_prompt_tokens
        return Candidate(worker.id, held, held, uncached, worker.in_flight, base, queue, bias, score, 0.0, score)

    def joined(self, worker: Worker, *, anew: bool) -> None:
        """The code never hears that an engine is a new one; here its tree starts anew, too."""
        if anew:
            self._workers[worker.id] = _ReleasedWorker()

    def left(self, worker: Worker) -> None:
        """Forgets the worker."""
        del self._workers[worker.id]

    def reserved(self, reservation: Reservation, chosen: Candidate) -> None:
        """W += base, and the text counts as cached at once. Raises: RuntimeError if nothing was judged before."""
        if self._judged is None:
            raise RuntimeError(f"{reservation.request.request_id} was reserved and not judged")
        known, now_ms = self._workers[chosen.worker], reservation.dispatched_ms
        base = int(chosen.service_ms)
        self._sent[reservation.request.request_id] = _Sent(self._judged, base, int(chosen.queue_ms))
        known.queue.add(base, now_ms=now_ms)
        known.texts.insert(self._judged, now_ms=now_ms)

    def first_token(self, reservation: Reservation, *, now_ms: float) -> None:
        """The code counts a request until it completes."""

    def ended(self, reservation: Reservation, event: Ended, *, now_ms: float) -> None:
        """Takes off what is left of base; a completed request is inserted again, and corrects θ."""
        sent = self._sent.pop(event.request_id)
        if not reservation.held:
            return
        known = self._workers[reservation.worker.id]
        elapsed_ms = now_ms - reservation.dispatched_ms
        known.queue.take_off(sent.base, elapsed_ms=elapsed_ms, now_ms=now_ms)
        if event.outcome is Outcome.COMPLETED:
            known.texts.insert(sent.text, now_ms=now_ms)
            known.bias.learn(elapsed_ms - sent.base - sent.queue)

    def belief(self, worker: Worker, *, now_ms: float) -> WorkerBelief:
        """A token costs what its characters cost."""
        known = self._workers[worker.id]
        return WorkerBelief(
            worker=worker.id,
            eligible=worker.eligible,
            in_flight=worker.in_flight,
            queue_ms=known.queue.at(now_ms),
            residual_ms=known.bias.value,
            prefill_ms_per_token=MEAN_CHARACTERS,
            speed_factor=1.0,
            observations=known.bias.observations,
        )
