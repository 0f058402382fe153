"""A policy that takes few at a time and remembers what it was told."""

from __future__ import annotations

from collections.abc import Sequence

from kvrouting_core.routing.decision import Action
from kvrouting_core.routing.events import Arrival, Ended, Event, Outcome
from kvrouting_core.routing.policy import AdmissionLimits
from tests.fakes.waiting_policy import OneAtATime


class Recording(OneAtATime):
    """Remembers the events that the router tells."""

    def __init__(self, *, at_once: int = 1, max_waiting: int = 100) -> None:
        super().__init__(at_once=at_once, limits=AdmissionLimits(max_waiting=max_waiting))
        self.events: list[Event] = []

    def handle(self, event: Event, *, now_ms: float) -> Sequence[Action]:
        self.events.append(event)
        return super().handle(event, now_ms=now_ms)

    def outcomes(self) -> list[Outcome]:
        """Of all requests that ended, in order."""
        return [e.outcome for e in self.events if isinstance(e, Ended)]

    def each_arrival_ended_once(self) -> bool:
        """Arrivals and ends pair up."""
        arrived = [e.request.request_id for e in self.events if isinstance(e, Arrival)]
        ended = [e.request_id for e in self.events if isinstance(e, Ended)]
        return sorted(arrived) == sorted(ended)
