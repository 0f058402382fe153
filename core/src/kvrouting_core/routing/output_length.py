"""How long an answer will be: not known when routing, so the pool's running mean stands in."""

from __future__ import annotations

from kvrouting_core.routing.events import Ended, Outcome, RoutingRequest
from kvrouting_core.routing.running_mean import RunningMean


class OutputLength:
    """m̂: mean length of one answer in tokens."""

    __slots__ = ("_mean",)

    def __init__(self, initial_tokens: float) -> None:
        self._mean = RunningMean(initial_tokens)

    @property
    def mean_tokens(self) -> float:
        """m̂."""
        return self._mean.value

    def learn(self, event: Ended, request: RoutingRequest) -> None:
        """Takes a completed request; what was cut short or is not counted tells nothing."""
        if event.outcome is Outcome.COMPLETED and event.output_tokens is not None:
            self._mean.learn(event.output_tokens / request.sequences)

    def expected(self, request: RoutingRequest) -> float:
        """Tokens of one answer: the mean, or the client's own limit if that is less."""
        limit = request.max_output_tokens
        return self._mean.value if limit is None else min(self._mean.value, limit)
