"""How long decisions and evictions take on this machine, measured in a simulation that is otherwise the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvrouting_core.identity import WorkerId
from kvrouting_core.radix_cache import RadixCache
from kvrouting_core.routing.decision import Action
from kvrouting_core.routing.events import Event
from kvrouting_core.routing.policy import Policy, WorkerBelief

Seconds = Callable[[], float]


@dataclass(slots=True)
class Stopwatch:
    """Adds up. seconds: a clock that measures work."""

    seconds: Seconds
    total_s: float = 0.0

    def add(self, begun_s: float) -> None:
        """What passed since then."""
        self.total_s += self.seconds() - begun_s


class TimedPolicy:
    """A policy whose every event is timed: a decision costs what its choice and all that it learns from costs."""

    def __init__(self, policy: Policy, watch: Stopwatch) -> None:
        self._policy = policy
        self._watch = watch

    @property
    def name(self) -> str:
        """Of the policy."""
        return self._policy.name

    @property
    def waiting(self) -> int:
        """Of the policy."""
        return self._policy.waiting

    def in_flight(self, worker: WorkerId) -> int:
        """Of the policy."""
        return self._policy.in_flight(worker)

    def beliefs(self, *, now_ms: float) -> Sequence[WorkerBelief]:
        """Of the policy."""
        return self._policy.beliefs(now_ms=now_ms)

    def handle(self, event: Event, *, now_ms: float) -> Sequence[Action]:
        """The policy's actions."""
        begun_s = self._watch.seconds()
        actions = self._policy.handle(event, now_ms=now_ms)
        self._watch.add(begun_s)
        return actions


def timed_cache(watch: Stopwatch) -> type[RadixCache]:
    """A class of caches whose evictions are timed: choosing victims and taking them out of the tree."""

    class TimedCache(RadixCache):
        def evict(self, tokens: int) -> int:
            begun_s = watch.seconds()
            evicted = super().evict(tokens)
            watch.add(begun_s)
            return evicted

    return TimedCache
