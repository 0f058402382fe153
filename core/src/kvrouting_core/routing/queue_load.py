"""P: the work in ms that a new request would wait for on one worker."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What one dispatched request costs its worker, as estimated when it was dispatched.

    prefill_ms: at the speed of the class prior; service_ms: s, prefill at the learned speed and the answer.
    context_tokens: KV tokens that each decode step reads for it.
    """

    request_id: str
    dispatched_ms: float
    uncached_tokens: int
    prefill_ms: float
    service_ms: float
    context_tokens: int
    sequences: int


class Drain(NamedTuple):
    """P = f·total − min(now − since, f·oldest), at least 0, until something happens. f: the worker's speed factor."""

    total_ms: float
    oldest_ms: float
    since_ms: float


NO_DRAIN = Drain(0.0, 0.0, -math.inf)


class QueueLoad(Protocol):
    """The queue of one worker, own requests only. A request that is not in it any more may be ended again."""

    def add(self, work: Work) -> None:
        """A request was dispatched."""

    def prefilled(self, request_id: str, *, now_ms: float) -> None:
        """Its first token came, or the engine's report shows that it is past its prefill."""

    def remove(self, request_id: str, *, now_ms: float) -> None:
        """It ended."""

    def load_ms(self, now_ms: float, speed: float) -> float:
        """P. speed: learned speed factor of the worker, 1 is the class prior."""

    def below_ms(self, limit_ms: float, speed: float) -> float:
        """P stays at limit_ms or above until then, unless something happens: ±infinity for always or unknown."""

    def drain(self) -> Drain | None:
        """The numbers that P follows from; None if it is not of that form."""


class DecayedQueue:
    """The paper's: P += s on dispatch, P ← ρ·P every Δt, on the end of a request what is left of its own s goes.

    The decay is taken as continuous, ρ^(elapsed/Δt), so the contributions cancel exactly.
    """

    __slots__ = ("_as_of_ms", "_factor", "_interval_ms", "_load_ms", "_work")

    def __init__(self, *, factor: float, interval_ms: float) -> None:
        self._factor = factor
        self._interval_ms = interval_ms
        self._load_ms = 0.0
        self._as_of_ms = 0.0
        self._work: dict[str, Work] = {}

    def add(self, work: Work) -> None:
        """P += s."""
        self._advance(work.dispatched_ms)
        self._load_ms += work.service_ms
        self._work[work.request_id] = work

    def prefilled(self, request_id: str, *, now_ms: float) -> None:
        """The paper counts a request until it completes: only time passes."""
        if request_id in self._work:
            self._advance(now_ms)

    def remove(self, request_id: str, *, now_ms: float) -> None:
        """Takes off s·ρ^(elapsed/Δt)."""
        work = self._work.pop(request_id, None)
        if work is None:
            return
        self._advance(now_ms)
        self._load_ms -= work.service_ms * self._left(now_ms - work.dispatched_ms)
        if not self._work or self._load_ms < 0:
            self._load_ms = 0.0  # what floating point left over

    def load_ms(self, now_ms: float, speed: float) -> float:  # noqa: ARG002 - the paper's s holds the speed
        """P, decayed until now."""
        return self._load_ms * self._left(now_ms - self._as_of_ms) if self._load_ms else 0.0

    def below_ms(self, limit_ms: float, speed: float) -> float:  # noqa: ARG002 - see `QueueLoad`
        """Not worked out."""
        return -math.inf

    def drain(self) -> Drain | None:
        """None: it decays."""
        return None

    def _advance(self, now_ms: float) -> None:
        self._load_ms *= self._left(now_ms - self._as_of_ms)
        self._as_of_ms = max(now_ms, self._as_of_ms)

    def _left(self, elapsed_ms: float) -> float:
        return math.pow(self._factor, max(0.0, elapsed_ms) / self._interval_ms)


class DrainedQueue:
    """Ours: prefill work of own requests without a first token, less what the worker has done of it meanwhile.

    An engine prefills the oldest requests first, up to a chunk at once, and their first tokens come when the chunk
    is done. So since the last first token (or since the queue began to fill) at most the oldest chunk's work is done:
    P = f·Σ prefill − min(now − since, f·oldest chunk).
    """

    __slots__ = ("_chunk_tokens", "_oldest_chunk_ms", "_since_ms", "_total_ms", "_work")

    def __init__(self, *, chunk_tokens: int) -> None:
        self._chunk_tokens = chunk_tokens
        self._work: dict[str, Work] = {}  # in order of dispatch
        self._total_ms = 0.0
        self._oldest_chunk_ms: float | None = 0.0  # None: to be summed again
        self._since_ms = 0.0

    def add(self, work: Work) -> None:
        """Puts the request at the end."""
        if not self._work:
            self._since_ms = work.dispatched_ms
        self._work[work.request_id] = work
        self._total_ms += work.prefill_ms
        self._oldest_chunk_ms = None

    def prefilled(self, request_id: str, *, now_ms: float) -> None:
        """Takes the request off; what is left begins now."""
        if self._take(request_id):
            self._since_ms = now_ms

    def remove(self, request_id: str, *, now_ms: float) -> None:  # noqa: ARG002 - an abort finishes no chunk
        """Takes the request off; the chunk in progress goes on."""
        self._take(request_id)

    def load_ms(self, now_ms: float, speed: float) -> float:
        """P: 0 if no request is without a first token."""
        if not self._work:
            return 0.0
        return max(0.0, self._total_ms * speed - min(now_ms - self._since_ms, self._oldest() * speed))

    def below_ms(self, limit_ms: float, speed: float) -> float:
        """By the drain of the oldest chunk alone."""
        if (self._total_ms - self._oldest()) * speed >= limit_ms:
            return math.inf
        return self._since_ms + self._total_ms * speed - limit_ms

    def drain(self) -> Drain | None:
        """As the class says."""
        return Drain(self._total_ms, self._oldest(), self._since_ms) if self._work else NO_DRAIN

    def _take(self, request_id: str) -> bool:
        work = self._work.pop(request_id, None)
        if work is None:
            return False
        self._total_ms = self._total_ms - work.prefill_ms if self._work else 0.0
        self._oldest_chunk_ms = None
        return True

    def _oldest(self) -> float:
        if self._oldest_chunk_ms is None:
            self._oldest_chunk_ms = self._sum_oldest_chunk()
        return self._oldest_chunk_ms

    def _sum_oldest_chunk(self) -> float:
        left, total_ms = self._chunk_tokens, 0.0
        for work in self._work.values():
            if work.uncached_tokens >= left:
                return total_ms + work.prefill_ms * left / work.uncached_tokens
            left -= work.uncached_tokens
            total_ms += work.prefill_ms
        return total_ms


def surely_prefilled(
    work: Iterable[Work], *, sent_before_ms: float, waiting_uncached_tokens: int, chunk_tokens: int
) -> list[Work]:
    """Requests without a first token that cannot wait any more, by the engine's word.

    work: in order of dispatch. The engine has `waiting_uncached_tokens` ahead of it and at most a chunk in progress,
    and serves in order: of what was sent before its report, all beyond the newest requests of so many tokens is done.
    This is how an answer that is not streamed leaves the queue.
    """
    sent = [w for w in work if w.dispatched_ms < sent_before_ms]
    allowed = waiting_uncached_tokens + chunk_tokens
    for position in range(len(sent) - 1, -1, -1):
        allowed -= sent[position].uncached_tokens
        if allowed < 0:
            return sent[:position]
    return []
