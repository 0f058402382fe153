"""What prefilling a request costs on each worker: one vector over the workers for each request."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat

import numpy as np

from kvrouting_core.routing.events import RoutingRequest
from kvrouting_core.routing.ledger import Worker
from kvrouting_core.routing.policy import CacheView
from kvrouting_core.routing.station import Station
from kvrouting_core.routing.waiting_line import Queued, Vector, WaitingLine

# Instead of infinity, which times a price of zero is no number.
NEVER_MS = 1e15


class WorkTable:
    """The workers of one moment, in order. Made anew when one joins, pauses or goes."""

    def __init__(
        self, workers: Sequence[Worker], stations: Sequence[Station], *, cache: CacheView, block_size_tokens: int
    ) -> None:
        self.workers = workers
        self.stations = stations
        self._cache = cache
        self._block_size = block_size_tokens
        self._place = {worker.id: place for place, worker in enumerate(workers)}
        self._ids = [worker.id for worker in workers]
        self._counts = [worker.credit.counts for worker in workers]
        self._a: Vector = np.array([station.a for station in stations])
        self._b: Vector = np.array([station.b for station in stations])
        pages = np.array([worker.profile.page_size_tokens for worker in workers])
        self._pages = pages if (pages > 1).any() else None

    def weigh(self, item: Queued, line: WaitingLine, *, now_ms: float) -> None:
        """Matches the request and sets its work on each worker, the least of them, and its deepest cached block."""
        request = item.waiting.request
        blocks = request.blocks
        item.weighed_ms = now_ms
        item.matched = dict(self._cache.match(blocks)) if len(blocks) else {}
        depths = self._depths(item)
        deepest = max(depths, default=0)
        line.set_deepest(item, blocks[deepest - 1] if deepest else None)
        item.work_ms = self._work_ms(request, depths)
        speeds = np.array([station.speed for station in self.stations])
        least_ms = float((item.work_ms * speeds).min())
        if least_ms < NEVER_MS * speeds.min():  # else all that it may go to are paused
            line.set_least(item, least_ms)

    def _depths(self, item: Queued) -> list[int]:
        """Leading blocks that each worker holds or is about to hold."""
        blocks, length = item.blocks, len(item.blocks)
        if not length:
            return [0] * len(self.workers)
        depths = list(map(item.matched.get, self._ids, repeat(0)))
        for place, (held, counts) in enumerate(zip(depths, self._counts, strict=True)):
            if held < length and blocks[held] in counts:
                depths[place] = self.workers[place].credit.depth(blocks, held)
        return depths

    def _work_ms(self, request: RoutingRequest, depths: list[int]) -> Vector:
        """`a·u + b·u·(h + u/2)`, further prompts as whole ones; NEVER_MS where the request may not go."""
        prompt = request.prompt_tokens
        cached: Vector = np.array(depths, dtype=np.float64)
        cached *= self._block_size
        np.minimum(cached, prompt - 1, out=cached)
        if self._pages is not None:
            cached -= cached % self._pages
        new = prompt - cached
        work: Vector = new * (self._a + self._b * (cached + new / 2))
        if request.further_prompt_tokens:
            work += request.further_prompt_tokens * (self._a + self._b * (prompt / 2))
        for worker in request.excluded:
            place = self._place.get(worker)
            if place is not None:
                work[place] = NEVER_MS
        return work
