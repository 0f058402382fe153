"""When a request is turned away, and when it may come back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvrouting_core.routing.decision import Candidate
from kvrouting_core.routing.ledger import Worker
from kvrouting_core.routing.policy import AdmissionLimits
from kvrouting_core.routing.running_mean import RunningMean

_LEAST_RETRY_MS = 1000.0


class Overload(NamedTuple):
    """No worker has room. retry_after_ms: expected time until one has."""

    retry_after_ms: float


class Admission:
    """Checks the limits of each worker. A policy that expects no wait (queue_ms 0) is limited in flight alone."""

    __slots__ = ("_latency", "_limits")

    def __init__(self, limits: AdmissionLimits) -> None:
        self._limits = limits
        self._latency = RunningMean(_LEAST_RETRY_MS)

    def completed(self, latency_ms: float) -> None:
        """Learns how long requests take, dispatch to end."""
        self._latency.learn(latency_ms)

    def open(self, candidates: Sequence[Candidate], workers: Sequence[Worker]) -> list[Candidate]:
        """The candidates whose worker is below both limits. workers: of the candidates, in the same order."""
        most, longest_ms = self._limits.max_in_flight_per_worker, self._limits.max_expected_wait_ms
        return [c for c, w in zip(candidates, workers, strict=True) if w.in_flight < most and c.queue_ms <= longest_ms]

    def overload(self, candidates: Sequence[Candidate], workers: Sequence[Worker]) -> Overload:
        """For when none is open: the time until the first of them is expected to be, at least 1 s."""
        waits_ms = (self._until_open_ms(c, w) for c, w in zip(candidates, workers, strict=True))
        return Overload(max(_LEAST_RETRY_MS, min(waits_ms)))

    @staticmethod
    def retry_after_ms(excess_ms: float) -> float:
        """For a wait that is too long by so much: P shrinks by a millisecond each, and 1 s is the least."""
        return max(_LEAST_RETRY_MS, excess_ms)

    def _until_open_ms(self, candidate: Candidate, worker: Worker) -> float:
        """P shrinks by a millisecond each; of k requests that take L ms each, one ends every L/k ms (Little's law)."""
        excess_ms = candidate.queue_ms - self._limits.max_expected_wait_ms
        if worker.in_flight < self._limits.max_in_flight_per_worker:
            return excess_ms
        return max(excess_ms, self._latency.value / worker.in_flight)
