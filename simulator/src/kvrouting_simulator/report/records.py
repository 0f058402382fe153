"""What is written down of each request of a run, and of what happened to the pool meanwhile."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvrouting_core.routing.events import Outcome


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestRecord:
    """One request as its client saw it. Times are ms on the clock of the run, which starts at 0.

    arrival_ms: when the request was due; latency and time to first token count from here, so that a client
        that sends late hides nothing.
    first_token_ms: None if no token came.
    end_ms: when the answer was complete, or the request was given up.
    cached_tokens: prompt tokens that the worker had in its cache, as the worker reports them.
    worker: who answered (last); None if nobody did or the answer does not say.
    error: None for a completed request, else `kind: detail`; failures are counted by their kind.
    sent_ms: when the client really sent it; None where there is no sending (virtual clock).
    resubmissions: times the client sent it again because its answer was cut short.
    """

    request_id: str
    arrival_ms: float
    first_token_ms: float | None
    end_ms: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    worker: str | None
    outcome: Outcome
    error: str | None = None
    sent_ms: float | None = None
    resubmissions: int = 0

    def __post_init__(self) -> None:
        self._check_times()
        for name in ("prompt_tokens", "cached_tokens", "output_tokens", "resubmissions"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} of {self.request_id} is {getattr(self, name)}: must not be negative")
        if self.cached_tokens > self.prompt_tokens:
            raise ValueError(
                f"cached_tokens {self.cached_tokens} of {self.request_id} exceed its {self.prompt_tokens} prompt tokens"
            )
        if (self.outcome is Outcome.COMPLETED) != (self.error is None):
            raise ValueError(
                f"{self.request_id} is {self.outcome.value} with error {self.error!r}: "
                "a completed request has none, any other one says why"
            )

    def _check_times(self) -> None:
        if not math.isfinite(self.arrival_ms) or not math.isfinite(self.end_ms):
            raise ValueError(f"{self.request_id} runs from {self.arrival_ms} to {self.end_ms} ms: not finite")
        if self.end_ms < self.arrival_ms:
            raise ValueError(f"{self.request_id} ends at {self.end_ms} ms, arrives only at {self.arrival_ms} ms")
        first = self.first_token_ms
        if first is not None and not self.arrival_ms <= first <= self.end_ms:
            raise ValueError(
                f"first token of {self.request_id} at {first} ms, outside {self.arrival_ms}..{self.end_ms} ms"
            )

    @property
    def completed(self) -> bool:
        """Whether the whole answer arrived."""
        return self.outcome is Outcome.COMPLETED

    @property
    def latency_ms(self) -> float:
        """From the moment it was due to its end."""
        return self.end_ms - self.arrival_ms

    @property
    def ttft_ms(self) -> float | None:
        """Time to first token; None if no token came."""
        return None if self.first_token_ms is None else self.first_token_ms - self.arrival_ms

    @property
    def tpot_ms(self) -> float | None:
        """Time per output token after the first; None with fewer than two tokens."""
        if self.first_token_ms is None or self.output_tokens < 2:
            return None
        return (self.end_ms - self.first_token_ms) / (self.output_tokens - 1)

    @property
    def lateness_ms(self) -> float | None:
        """How long after its due time the client sent it; None where there is no sending."""
        return None if self.sent_ms is None else self.sent_ms - self.arrival_ms

    @property
    def error_kind(self) -> str | None:
        """The part of `error` before its first colon; None for a completed request."""
        return None if self.error is None else self.error.split(":", 1)[0].strip()


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolMark:
    """What happened to a worker during a run, a line in the plots. kind: `killed`, `returned`, ..."""

    at_ms: float
    kind: str
    worker: str
