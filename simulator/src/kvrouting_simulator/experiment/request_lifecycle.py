"""A request on its way through the simulated router, from its arrival to its record."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from kvrouting_core.identity import WorkerId
from kvrouting_core.routing.events import Outcome
from kvrouting_simulator.report import RequestRecord
from kvrouting_simulator.workloads import ReadyRequest


@dataclass(slots=True)
class RequestLifecycle:
    """Mutable state of one request. worker: where its present attempt is; None while the router keeps it.

    attempt: number of the present one, from 1; what belongs to an earlier one is ignored.
    arrived_ms: at the router, the last time that the client sent it. first_attempt: the first one since then.
    """

    ready: ReadyRequest
    blocks: list[int]
    worker: WorkerId | None = None
    attempt: int = 1
    arrived_ms: float = 0.0
    first_attempt: int = 1
    resubmissions: int = 0
    excluded: frozenset[WorkerId] = frozenset()
    first_token_ms: float | None = None
    cached_tokens: int = 0
    answer: array[int] = field(default_factory=lambda: array("I"))

    @property
    def attempts(self) -> int:
        """Made by the router since the client sent it last."""
        return self.attempt - self.first_attempt + 1

    def begin_again(self, *, now_ms: float) -> None:
        """The client sends it again: a new request for the router."""
        self.attempt += 1
        self.first_attempt = self.attempt
        self.arrived_ms = now_ms
        self.resubmissions += 1
        self.worker, self.excluded = None, frozenset()
        self.first_token_ms, self.cached_tokens, self.answer = None, 0, array("I")

    def record(self, *, end_ms: float, outcome: Outcome, error: str | None) -> RequestRecord:
        """What its client saw."""
        ready = self.ready
        return RequestRecord(
            request_id=ready.request_id,
            arrival_ms=ready.start_ms,
            first_token_ms=self.first_token_ms,
            end_ms=end_ms,
            prompt_tokens=len(ready.prompt),
            cached_tokens=self.cached_tokens,
            output_tokens=len(self.answer),
            worker=self.worker,
            outcome=outcome,
            error=error,
            resubmissions=self.resubmissions,
        )
