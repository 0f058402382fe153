"""The engine as a step machine: requests come in, batches are decided, time passes elsewhere, tokens come out.

The scheduler is SGLang's with its defaults: first come first served; a prefill batch goes before any decode step; a
prefix is matched, and locked, when its request is admitted and what is computed is inserted when the batch is done.
Requests that share an uncached prefix in one batch each compute it, and the tree keeps one copy (SGLang looks for
prefixes inside a batch only under its cache-aware queue orders). When decode runs out of slots, requests are
retracted: those with the shortest answers so far lose their slots and queue up again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from kvrouting_core.radix_cache import RadixCache
from kvrouting_core.routing.events import SchedulerOptions
from kvrouting_core.service_time import StepTimes
from kvrouting_simulator.engine_model.admission import Admission, PrefillItem
from kvrouting_simulator.engine_model.kv_slots import KvSlots
from kvrouting_simulator.engine_model.output_reserve import RETRACTION_HEADROOM_STEPS, OutputReserve
from kvrouting_simulator.engine_model.request import (
    EngineLoad,
    EngineRequest,
    RequestTooLong,
    StepKind,
    TokenProduced,
)
from kvrouting_simulator.engine_model.sequence import Sequence

AnswerToken = Callable[[EngineRequest, int], int]
"""Gives token number `index` of the answer to a request; the same for the same arguments."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Step:
    """One batch that the engine computes from started_ms on, for duration_ms.

    prefill, decode: its parts; `requests` counts them, `prefill_tokens` are the uncached tokens it computes.
    """

    kind: StepKind
    started_ms: float
    duration_ms: float
    prefill: list[PrefillItem] = field(repr=False)
    decode: list[Sequence] = field(repr=False)

    @property
    def requests(self) -> int:
        """Requests in the batch."""
        return len(self.prefill) + len(self.decode)

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens that the step computes."""
        return sum(item.new_tokens for item in self.prefill)


@dataclass(slots=True)
class _Totals:
    prefill_uncached_tokens: int = 0
    prefill_busy_us: int = 0
    busy_us: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    retractions: int = 0


class EngineModel:
    """SGLang's scheduler over a radix cache and a time model.

    The caller owns the clock: it calls `start_step`, lets `duration_ms` pass, and calls `finish_step`; between the two
    it may submit and abort. Time must not go backwards.
    Raises: ValueError if a chunk of the scheduler is smaller than a page of the cache.
    """

    def __init__(
        self, *, times: StepTimes, cache: RadixCache, options: SchedulerOptions, answer_token: AnswerToken
    ) -> None:
        if options.chunked_prefill_tokens < cache.page_size:
            raise ValueError(
                f"chunked_prefill_tokens {options.chunked_prefill_tokens} is less than a page of {cache.page_size}"
            )
        self._times = times
        self._cache = cache
        self._options = options
        self._answer_token = answer_token
        self._slots = KvSlots(cache)
        self._admission = Admission(self._slots, options)
        self._reserve = OutputReserve()
        self._waiting: deque[Sequence] = deque()
        self._running: dict[str, Sequence] = {}
        self._ids: set[str] = set()
        self._unfinished: Sequence | None = None  # its prompt is partly prefilled
        self._step: Step | None = None
        self._decodes_since_prefill = options.prefill_decode_interval
        self._waiting_uncached_tokens = 0
        self._now_ms = 0.0
        self._totals = _Totals()

    # ---- requests ----

    def submit(self, request: EngineRequest, *, now_ms: float) -> None:
        """Queues a request.

        Raises: RequestTooLong if prompt and answer exceed the cache; ValueError for an id that is still served.
        """
        self._advance(now_ms)
        needed = len(request.prompt) + request.output_tokens
        if self._slots.ceil(needed - 1) > self._slots.capacity_tokens:
            raise RequestTooLong(request.request_id, needed_tokens=needed, capacity_tokens=self._cache.capacity_tokens)
        if request.request_id in self._ids:
            raise ValueError(f"request id {request.request_id} is already being served")
        self._ids.add(request.request_id)
        self._enqueue(Sequence(request))

    def abort(self, request_id: str) -> bool:
        """Ends a request whose client left; no token of it follows. Returns: whether it was there.

        What it has computed stays cached. If it is part of the step under way, its slots are freed when that ends.
        """
        if request_id not in self._ids:
            return False
        self._ids.remove(request_id)
        for sequence in self._waiting:
            if sequence.request.request_id == request_id:
                self._waiting.remove(sequence)
                self._waiting_uncached_tokens -= sequence.uncached_on_arrival
                return True
        sequence = self._admitted(request_id)
        if self._in_step(sequence):
            sequence.leaving = True
        else:
            self._leave(sequence)
        return True

    def _admitted(self, request_id: str) -> Sequence:
        """A request that is neither waiting nor gone: running, partly prefilled, or in the step's prefill."""
        running = self._running.get(request_id)
        if running is not None:
            return running
        prefilled = [item.sequence for item in self._step.prefill] if self._step else []
        candidates = [*prefilled, *([self._unfinished] if self._unfinished else [])]
        return next(s for s in candidates if s.request.request_id == request_id)

    def flush(self) -> bool:
        """Empties the cache, as `/flush_cache` does. Returns: False, and does nothing, if anything runs or waits."""
        if self._ids or self._step is not None:
            return False
        self._cache.clear()
        return True

    @property
    def idle(self) -> bool:
        """Whether nothing runs or waits."""
        return not self._ids and self._step is None

    def load(self) -> EngineLoad:
        """What the engine reports now."""
        totals = self._totals
        unfinished = self._unfinished
        return EngineLoad(
            running_requests=len(self._ids) - len(self._waiting),
            waiting_requests=len(self._waiting),
            used_tokens=self._slots.used_tokens,
            max_total_tokens=self._cache.capacity_tokens,
            max_running_requests=self._options.max_running_requests,
            waiting_uncached_tokens=self._waiting_uncached_tokens + (unfinished.missing_tokens if unfinished else 0),
            total_prefill_uncached_tokens=totals.prefill_uncached_tokens,
            total_prefill_busy_us=totals.prefill_busy_us,
            total_busy_us=totals.busy_us,
            total_prompt_tokens=totals.prompt_tokens,
            total_cached_tokens=totals.cached_tokens,
            total_output_tokens=totals.output_tokens,
            total_retractions=totals.retractions,
        )

    # ---- steps ----

    def start_step(self, *, now_ms: float) -> Step | None:
        """Decides the next batch and takes its slots. None: there is nothing to do.

        Raises: RuntimeError while a step is under way.
        """
        self._advance(now_ms)
        if self._step is not None:
            raise RuntimeError("a step is under way: finish it first")
        self._step = self._next_prefill() if self._prefill_is_due() else None
        if self._step is None:
            self._step = self._next_decode()
        if self._step is None:
            self._reserve.idle()
        return self._step

    def finish_step(self, step: Step, *, now_ms: float) -> list[TokenProduced]:
        """The step is computed: inserts what was prefilled, and gives the tokens.

        Raises: ValueError for a step that is not under way.
        """
        self._advance(now_ms)
        if step is not self._step:
            raise ValueError("this step is not under way")
        self._step = None
        self._count(step)
        produced: list[TokenProduced] = []
        for item in step.prefill:
            self._finish_prefill(item, produced)
        for sequence in step.decode:
            if sequence.leaving:
                self._leave(sequence)
            else:
                self._produce(sequence, produced)
        return produced

    def _prefill_is_due(self) -> bool:
        if not self._waiting and self._unfinished is None:
            return False
        return not self._running or self._decodes_since_prefill >= self._options.prefill_decode_interval

    def _next_prefill(self) -> Step | None:
        running = list(self._running.values())
        shared = running if self._options.mixed_chunk else []
        decode_slots = self._decode_slots(shared)
        if decode_slots > self._slots.room_tokens:
            return None  # the decode step makes room by retraction
        items = self._admission.batch(
            self._waiting,
            self._unfinished,
            running=len(running),
            kept_back=self._reserve.tokens(running, page_size=self._slots.page_size) + decode_slots,
            decoding=len(shared),
        )
        if not items:
            return None
        self._admit(items)
        self._feed_back(shared, decode_slots)
        self._decodes_since_prefill = 0
        kind = StepKind.MIXED if shared else StepKind.PREFILL
        duration = self._prefill_ms(items, shared)
        return Step(kind=kind, started_ms=self._now_ms, duration_ms=duration, prefill=items, decode=shared)

    def _next_decode(self) -> Step | None:
        if not self._running:
            return None
        running = self._fit_decode()
        if not running:  # all slots are those of the partly prefilled prompt
            return self._next_prefill()
        self._feed_back(running, self._decode_slots(running))
        self._decodes_since_prefill += 1
        context = sum(sequence.kv_tokens for sequence in running)
        duration = self._times.decode_ms(len(running), context)
        return Step(kind=StepKind.DECODE, started_ms=self._now_ms, duration_ms=duration, prefill=[], decode=running)

    def _prefill_ms(self, items: list[PrefillItem], shared: list[Sequence]) -> float:
        """Time of a prefill batch; decodes in it add their tokens and what they read, not another pass."""
        parts = [(item.present_tokens, item.new_tokens) for item in items]
        if not shared:
            return self._times.prefill_ms(parts)
        times = self._times
        context = sum(sequence.kv_tokens for sequence in shared)
        return (
            times.prefill_ms([*parts, *[(0, 1)] * len(shared)])
            + times.decode_ms_per_context_token * context
            + times.decode_ms_per_request * len(shared)
        )

    def _admit(self, items: list[PrefillItem]) -> None:
        self._unfinished = None if items[-1].last else items[-1].sequence
        for item in items:
            sequence = item.sequence
            self._waiting_uncached_tokens -= sequence.uncached_on_arrival
            sequence.uncached_on_arrival = 0
            if sequence.cached_tokens is None:
                sequence.cached_tokens = item.present_tokens
                self._totals.prompt_tokens += len(sequence.path)
                self._totals.cached_tokens += item.present_tokens

    # ---- decode ----

    def _decode_slots(self, sequences: list[Sequence]) -> int:
        """Slots that one more token of each needs: a page where the last one is full."""
        page = self._slots.page_size
        if page == 1:
            return len(sequences)
        return page * sum(1 for sequence in sequences if sequence.kv_tokens % page == 0)

    def _feed_back(self, sequences: list[Sequence], slots: int) -> None:
        self._slots.take(slots)
        for sequence in sequences:
            sequence.kv_tokens += 1

    def _fit_decode(self) -> list[Sequence]:
        """The running requests, after retractions if the next token of each would not fit.

        One request alone always fits, unless a partly prefilled prompt holds the rest of the cache.
        """
        running = list(self._running.values())
        if self._decode_slots(running) <= self._slots.room_tokens:
            self._reserve.decoded()
            return running
        ranked = sorted(running, key=lambda s: (len(s.answer), -len(s.path)), reverse=True)
        least = 0 if self._unfinished else 1
        while len(ranked) > least and not self._has_headroom(ranked):
            self._retract(ranked.pop())
        self._reserve.retracted(ranked)
        return list(self._running.values())

    def _has_headroom(self, kept: list[Sequence]) -> bool:
        wanted = max(self._decode_slots(kept), RETRACTION_HEADROOM_STEPS * len(kept))
        return wanted <= self._slots.room_tokens

    def _retract(self, sequence: Sequence) -> None:
        del self._running[sequence.request.request_id]
        self._slots.let_go(sequence)
        sequence.rewind()
        self._enqueue(sequence)
        self._totals.retractions += 1

    # ---- ends ----

    def _finish_prefill(self, item: PrefillItem, produced: list[TokenProduced]) -> None:
        sequence = item.sequence
        if sequence.leaving:
            self._leave(sequence)
            return
        self._slots.store(sequence)
        if item.last:
            self._running[sequence.request.request_id] = sequence
            self._produce(sequence, produced)

    def _produce(self, sequence: Sequence, produced: list[TokenProduced]) -> None:
        request = sequence.request
        index = len(sequence.answer)
        token = self._answer_token(request, index)
        sequence.answer.append(token)
        finished = index + 1 == request.output_tokens
        self._totals.output_tokens += 1
        produced.append(
            TokenProduced(
                request_id=request.request_id,
                token=token,
                index=index,
                finished=finished,
                finish_reason="length" if finished else None,
                cached_tokens=sequence.cached_tokens or 0,
                prompt_tokens=len(request.prompt),
            )
        )
        if finished:
            self._ids.remove(request.request_id)
            self._leave(sequence)

    def _leave(self, sequence: Sequence) -> None:
        """Caches what is computed and frees the slots."""
        self._slots.store(sequence)
        self._slots.let_go(sequence)
        self._running.pop(sequence.request.request_id, None)
        if sequence is self._unfinished:
            self._unfinished = None

    # ---- small steps ----

    def _advance(self, now_ms: float) -> None:
        if now_ms < self._now_ms:
            raise ValueError(f"now_ms {now_ms} is before {self._now_ms}: time goes forward")
        self._now_ms = now_ms

    def _enqueue(self, sequence: Sequence) -> None:
        sequence.uncached_on_arrival = len(sequence.path) - self._slots.match(sequence).tokens
        self._waiting_uncached_tokens += sequence.uncached_on_arrival
        self._waiting.append(sequence)

    def _in_step(self, sequence: Sequence) -> bool:
        step = self._step
        return step is not None and (
            any(s is sequence for s in step.decode) or any(i.sequence is sequence for i in step.prefill)
        )

    def _count(self, step: Step) -> None:
        # What really passed: the caller's clock may be a real one, or a slow card's.
        busy_us = round((self._now_ms - step.started_ms) * 1000)
        self._totals.busy_us += busy_us
        if step.prefill:
            self._totals.prefill_busy_us += busy_us
            self._totals.prefill_uncached_tokens += step.prefill_tokens
