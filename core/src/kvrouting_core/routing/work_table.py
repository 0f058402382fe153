"""What prefilling a request costs on each worker: one vector over the workers for each request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvrouting_core.identity import WorkerId
from kvrouting_core.routing.events import RoutingRequest
from kvrouting_core.routing.ledger import Worker
from kvrouting_core.routing.policy import CacheView
from kvrouting_core.routing.pool_columns import PoolColumns, Vector
from kvrouting_core.routing.worker_load import WorkerLoad

# Instead of infinity, which times a price of zero is no number.
NEVER_MS = 1e15


class RequestCosts(NamedTuple):
    """One request on each worker of a table, in its order.

    held_blocks: leading blocks that the index reports. cached_blocks: the same with what is being prefilled there.
    cached_tokens: what the engine can take over of cached_blocks. work_ms: prefill at the speed of the class prior,
    NEVER_MS where the request may not go. Both vectors have the shape (workers,).
    """

    held_blocks: list[int]
    cached_blocks: list[int]
    cached_tokens: Vector
    work_ms: Vector


class WorkTable:
    """The workers of one moment, in order. Made anew when one joins, pauses or goes.

    columns: what is believed of each, as of the last refresh.
    """

    def __init__(
        self, workers: Sequence[Worker], worker_loads: Sequence[WorkerLoad], *, cache: CacheView, block_size_tokens: int
    ) -> None:
        self.workers = workers
        self.worker_loads = worker_loads
        self._cache = cache
        self._block_size = block_size_tokens
        self._index_of = {worker.id: worker_index for worker_index, worker in enumerate(workers)}
        self.columns = PoolColumns(worker_loads)
        self.ids: Sequence[WorkerId] = [worker.id for worker in workers]
        self._counts = [worker.credit.counts for worker in workers]
        pages = np.array([worker.profile.page_size_tokens for worker in workers])
        self._pages = pages if (pages > 1).any() else None

    def estimate_cost(self, request: RoutingRequest) -> RequestCosts:
        """Matches the request and works out what it costs."""
        blocks, length = request.blocks, len(request.blocks)
        held = [0] * len(self.ids)
        if length:
            index_of = self._index_of.get
            for worker, depth in self._cache.match(blocks).items():
                worker_index = index_of(worker)
                if worker_index is not None:
                    held[worker_index] = depth
        cached = held
        # One block more than the index reports is the exception.
        ahead = [
            p
            for p, (d, counts) in enumerate(zip(held, self._counts, strict=True))
            if d < length and blocks[d] in counts
        ]
        if ahead:
            cached = held.copy()
            for worker_index in ahead:
                cached[worker_index] = self.workers[worker_index].credit.depth(blocks, held[worker_index])
        cached_tokens = self.reusable_tokens(cached, request.prompt_tokens)
        return RequestCosts(held, cached, cached_tokens, self._work_ms(request, cached_tokens))

    def reusable_tokens(self, blocks: Sequence[int], prompt_tokens: int) -> Vector:
        """As `Worker.reusable_tokens`. blocks: leading ones on each worker."""
        tokens: Vector = np.array(blocks, dtype=np.float64)
        tokens *= self._block_size
        np.minimum(tokens, prompt_tokens - 1, out=tokens)
        if self._pages is not None:
            tokens -= tokens % self._pages
        return tokens

    def _work_ms(self, request: RoutingRequest, cached: Vector) -> Vector:
        """`a·u + b·u·(h + u/2)`, further prompts as whole ones."""
        prompt, columns = request.prompt_tokens, self.columns
        new = prompt - cached
        work: Vector = new / 2
        work += cached
        work *= columns.b
        work += columns.a
        work *= new
        if request.further_prompt_tokens:
            work += request.further_prompt_tokens * (columns.a + columns.b * (prompt / 2))
        for worker in request.excluded:
            worker_index = self._index_of.get(worker)
            if worker_index is not None:
                work[worker_index] = NEVER_MS
        return work
