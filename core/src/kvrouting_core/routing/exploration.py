"""A worker that joins a pool at work gets a bounded share of the requests, so that it does not starve.

Its cache is empty and every prefix is held elsewhere: by cost alone it might wait for its first request for ever.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

from kvrouting_core.identity import WorkerId
from kvrouting_core.routing.decision import Candidate


class Exploration:
    """Counts how many requests each worker got since it joined, and now and then proposes one that got few."""

    def __init__(self, *, share: float, requests: int, extra_ms: float, rng: random.Random) -> None:
        self._share = share
        self._requests = requests
        self._extra_ms = extra_ms
        self._rng = rng
        self._served: dict[WorkerId, int] = {}
        self._newcomers: set[WorkerId] = set()

    def joined(self, worker: WorkerId) -> None:
        """It is new, or its cache is empty again."""
        self._served[worker] = 0
        if self._requests:
            self._newcomers.add(worker)

    def left(self, worker: WorkerId) -> None:
        """It is gone."""
        del self._served[worker]
        self._newcomers.discard(worker)

    def served(self, worker: WorkerId) -> None:
        """It got a request."""
        self._served[worker] += 1
        if self._served[worker] >= self._requests:
            self._newcomers.discard(worker)

    def propose(self, candidates: Iterable[Candidate], best: Candidate) -> Candidate | None:
        """A newcomer to be tried instead of the best. Not where most of the pool is new, nor beyond the extra cost."""
        if not self._newcomers or 2 * len(self._newcomers) > len(self._served):
            return None
        if best.worker in self._newcomers or self._rng.random() >= self._share:
            return None
        new = [c for c in candidates if c.worker in self._newcomers]
        if not new:
            return None
        cheapest = min(new, key=lambda c: c.cost_ms)
        return cheapest if cheapest.cost_ms <= best.cost_ms + self._extra_ms else None
