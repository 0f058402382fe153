"""The one interface of all routing policies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvrouting_core.identity import WorkerId
from kvrouting_core.routing.decision import Action
from kvrouting_core.routing.events import Event


class CacheView(Protocol):
    """What a policy may ask of the prefix index."""

    def match(self, blocks: Sequence[int]) -> Mapping[WorkerId, int]:
        """Worker → leading blocks held, 1..B; a worker that holds none is absent."""

    def count(self, worker: WorkerId) -> int:
        """Blocks that the worker holds; 0 if it is unknown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdmissionLimits:
    """When a request is refused instead of dispatched or kept waiting.

    max_waiting: requests in the router's own queue.
    max_expected_wait_ms: P of the best worker beyond which a new request is refused.
    max_in_flight_per_worker: requests of this router on one worker.
    """

    max_waiting: int = 1024
    max_expected_wait_ms: float = 120_000.0
    max_in_flight_per_worker: int = 4096

    def __post_init__(self) -> None:
        if self.max_waiting < 0:
            raise ValueError(f"max_waiting must not be negative, got {self.max_waiting}")
        if not self.max_expected_wait_ms > 0:
            raise ValueError(f"max_expected_wait_ms must be positive, got {self.max_expected_wait_ms}")
        if self.max_in_flight_per_worker < 1:
            raise ValueError(f"max_in_flight_per_worker must be at least 1, got {self.max_in_flight_per_worker}")


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerBelief:
    """What a policy believes of one worker now: shown by the router's debug page and metrics."""

    worker: WorkerId
    eligible: bool
    in_flight: int
    queue_ms: float
    residual_ms: float
    prefill_ms_per_token: float  # learned, or the class prior
    speed_factor: float  # learned slope over the prior's
    observations: int


class Policy(Protocol):
    """A state machine without I/O: an event goes in, actions come out, in one synchronous step.

    A policy may answer an arrival at once, later with any other event, or refuse it. Each arrival is answered by
    exactly one action, unless it is `Ended` while it waits. Choosing, reserving and crediting the prefix that is being
    prefilled are one step.

    Raises: ValueError for an event that contradicts the history (an id that arrives twice or is not known).
    """

    @property
    def name(self) -> str:
        """The name under which it is configured."""

    def handle(self, event: Event, *, now_ms: float) -> Sequence[Action]:
        """Takes one event; returns what is to be done now, in order."""

    @property
    def waiting(self) -> int:
        """Requests that arrived and have no action yet."""

    def in_flight(self, worker: WorkerId) -> int:
        """Requests dispatched to the worker and not ended; 0 if it is unknown."""

    def beliefs(self, *, now_ms: float) -> Sequence[WorkerBelief]:
        """Each known worker, in order of joining."""
