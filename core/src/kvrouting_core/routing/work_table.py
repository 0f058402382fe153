"""What prefilling a request costs on each worker: one vector over the workers for each request."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvrouting_core.routing.events import RoutingRequest
from kvrouting_core.routing.ledger import Worker
from kvrouting_core.routing.policy import CacheView
from kvrouting_core.routing.station import Station

Vector = npt.NDArray[np.float64]

# Instead of infinity, which times a price of zero is no number.
NEVER_MS = 1e15


class Weighed(NamedTuple):
    """One request on each worker of a table, in its order.

    held_blocks: leading blocks that the index reports. cached_blocks: the same with what is being prefilled there.
    work_ms: prefill at the speed of the class prior, shape (workers,); NEVER_MS where the request may not go.
    """

    held_blocks: list[int]
    cached_blocks: list[int]
    work_ms: Vector


class WorkTable:
    """The workers of one moment, in order. Made anew when one joins, pauses or goes.

    speeds: f of each, as of the last `learn`.
    """

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
        self.learn()

    def learn(self) -> None:
        """Takes the speeds that are believed now."""
        self.speeds: Vector = np.array([station.speed for station in self.stations])

    def weigh(self, request: RoutingRequest) -> Weighed:
        """Matches the request and works out what it costs."""
        blocks, length = request.blocks, len(request.blocks)
        matched = self._cache.match(blocks) if length else {}
        held = list(map(matched.get, self._ids, repeat(0)))
        cached = held
        for place, (depth, counts) in enumerate(zip(held, self._counts, strict=True)):
            if depth < length and blocks[depth] in counts:
                if cached is held:
                    cached = held.copy()
                cached[place] = self.workers[place].credit.depth(blocks, depth)
        return Weighed(held, cached, self._work_ms(request, cached))

    def reusable_tokens(self, blocks: Sequence[int], prompt_tokens: int) -> Vector:
        """As `Worker.reusable_tokens`. blocks: leading ones on each worker."""
        tokens: Vector = np.array(blocks, dtype=np.float64)
        tokens *= self._block_size
        np.minimum(tokens, prompt_tokens - 1, out=tokens)
        if self._pages is not None:
            tokens -= tokens % self._pages
        return tokens

    def _work_ms(self, request: RoutingRequest, cached_blocks: Sequence[int]) -> Vector:
        """`a·u + b·u·(h + u/2)`, further prompts as whole ones."""
        prompt = request.prompt_tokens
        cached = self.reusable_tokens(cached_blocks, prompt)
        new = prompt - cached
        work: Vector = new * (self._a + self._b * (cached + new / 2))
        if request.further_prompt_tokens:
            work += request.further_prompt_tokens * (self._a + self._b * (prompt / 2))
        for worker in request.excluded:
            place = self._place.get(worker)
            if place is not None:
                work[place] = NEVER_MS
        return work
