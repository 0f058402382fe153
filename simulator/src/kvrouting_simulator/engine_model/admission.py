"""Which waiting requests the next prefill batch takes, first come first served (SGLang's PrefillAdder)."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from kvrouting_core.routing.events import SchedulerOptions
from kvrouting_simulator.engine_model.kv_slots import KvSlots
from kvrouting_simulator.engine_model.output_reserve import LONGEST_RESERVE_TOKENS
from kvrouting_simulator.engine_model.sequence import Sequence


class PrefillItem(NamedTuple):
    """One sequence's share of a prefill batch. present_tokens: KV before the batch. last: its prompt is then done."""

    sequence: Sequence
    present_tokens: int
    new_tokens: int
    last: bool


class _Budget:
    """What the batch may still take. promised: slots of this batch and those kept back for running requests."""

    def __init__(self, options: SchedulerOptions, *, promised: float, decoding: int) -> None:
        self.batch_tokens = options.max_prefill_tokens - decoding
        self.chunk_tokens = options.chunked_prefill_tokens - decoding
        self.promised = promised

    @property
    def spent(self) -> bool:
        return self.batch_tokens <= 0 or self.chunk_tokens <= 0

    def charge(self, new_tokens: int, slots: int) -> None:
        self.batch_tokens -= new_tokens
        self.chunk_tokens -= new_tokens
        self.promised += slots


class Admission:
    """Fills prefill batches. The head of the queue is never passed: who does not fit makes all others wait.

    A request is admitted while free + evictable slots, less what is kept back, hold its uncached prompt and its whole
    answer. The chunk limit bounds the new tokens of the whole batch, as in SGLang: the last request that it cuts goes
    on in the next batch, before anything else.
    """

    def __init__(self, slots: KvSlots, options: SchedulerOptions) -> None:
        self._slots = slots
        self._options = options

    def batch(
        self, waiting: deque[Sequence], unfinished: Sequence | None, *, running: int, kept_back: float, decoding: int
    ) -> list[PrefillItem]:
        """Takes from the head of `waiting`, locks prefixes and reserves slots.

        unfinished: the request whose prompt is only partly prefilled. running: requests past their prompt.
        kept_back: slots that others must find free. decoding: tokens of running requests that share the step.
        """
        budget = _Budget(self._options, promised=kept_back, decoding=decoding)
        items: list[PrefillItem] = []
        if unfinished is not None:
            item = self._continue(unfinished, budget)
            if item is None or not item.last:
                return self._taken([item] if item else [])
            items.append(item)
        while waiting and not budget.spent and running + len(items) < self._options.max_running_requests:
            item = self._admit(waiting[0], budget, first=not items)
            if item is None:
                break
            waiting.popleft()
            items.append(item)
            if not item.last:  # one prompt at a time is partly prefilled, also if whole pages left budget over
                break
        return self._taken(items)

    def _continue(self, sequence: Sequence, budget: _Budget) -> PrefillItem | None:
        missing = sequence.missing_tokens
        new_tokens = min(missing, budget.chunk_tokens, self._slots.room_tokens)
        if new_tokens < missing:
            new_tokens = self._slots.floor(new_tokens)
        if new_tokens <= 0:
            return None
        budget.charge(new_tokens, self._slots.ceil(new_tokens))
        return PrefillItem(sequence, sequence.kv_tokens, new_tokens, new_tokens == missing)

    def _admit(self, sequence: Sequence, budget: _Budget, *, first: bool) -> PrefillItem | None:
        slots = self._slots
        match = slots.match(sequence)
        new_tokens = len(sequence.path) - match.tokens
        answer_tokens = min(sequence.remaining_output_tokens, LONGEST_RESERVE_TOKENS)
        # The last token of an answer is never fed back, so it needs no slot.
        needed = slots.ceil(len(sequence.path) + answer_tokens - 1) - match.tokens
        if needed > slots.room_tokens - match.unlocked_tokens - budget.promised:
            return None
        if new_tokens > budget.batch_tokens and not first:
            return None
        last = new_tokens <= budget.chunk_tokens
        if not last:
            new_tokens = needed = slots.floor(budget.chunk_tokens)
            if new_tokens <= 0:
                return None
        slots.hold_prefix(sequence)
        budget.charge(new_tokens, needed)
        return PrefillItem(sequence, match.tokens, new_tokens, last)

    def _taken(self, items: list[PrefillItem]) -> list[PrefillItem]:
        """Reserves what the batch computes. All prefixes are locked before: none of them is evicted for it."""
        self._slots.take(sum(self._slots.ceil(item.new_tokens) for item in items))
        for item in items:
            item.sequence.kv_tokens += item.new_tokens
        return items
