"""A request on its way through the simulated router, from its arrival to its record."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from kvrouting_core.identity import WorkerId
from kvrouting_core.routing.events import Outcome
from kvrouting_simulator.report import RequestRecord
from kvrouting_simulator.workloads import ReadyRequest


@dataclass(slots=True)
class Passage:
    """Mutable state of one request. worker: where its present attempt is; None while the router keeps it.

    attempt: number of the present one, from 1; what belongs to an earlier one is ignored.
    """

    ready: ReadyRequest
    blocks: list[int]
    worker: WorkerId | None = None
    attempt: int = 1
    excluded: frozenset[WorkerId] = frozenset()
    first_token_ms: float | None = None
    cached_tokens: int = 0
    answer: array[int] = field(default_factory=lambda: array("I"))

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
        )
