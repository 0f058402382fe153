"""When a worker has room for one more request of the router's queue.

Engines run a prefill before any decode step, so what waits inside an engine starves the answers that have begun there,
and cannot be planned again. A worker gets just enough to keep it busy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from kvrouting_core.routing.ledger import Worker
from kvrouting_core.routing.parameters import LbgrParameters
from kvrouting_core.routing.worker_load import WorkerLoad

_AHEAD_PER_DECODE = 10.0


class ReleaseInputs(NamedTuple):
    """Of one event: m̂, ū, and √(requests that wait for each worker), at least 1."""

    answer_tokens: float
    uncached_tokens: float
    queue_pressure: float


class Release:
    """Room: own work without a first token below H, and requests in flight below c.

    An engine that decodes between prefills (`prefill_decode_interval` N) starves no answer, so c does not apply. It
    takes one batch of prefills in N decode steps, and what is not there when the batch is made waits for the next one:
    with H ahead, prefill has H/(H + N·step) of its time. So H is ten times N·step, which loses a tenth, or a full batch
    with the steps after it if that is less. Mixed chunks need neither: decodes and prefills share each step.
    """

    def __init__(self, parameters: LbgrParameters, *, max_in_flight: int) -> None:
        self._ahead_ms = parameters.release_ahead_ms
        self._follows_scheduler = parameters.follow_scheduler
        self._theta = parameters.decode_limit
        self._max_in_flight = max_in_flight

    def with_capacity(
        self, workers: Sequence[Worker], worker_loads: Sequence[WorkerLoad], inputs: ReleaseInputs, *, now_ms: float
    ) -> list[int]:
        """Places of the workers that have room. worker_loads: of the workers, in the same order."""
        # Most workers of a busy pool are full, and known to be so for a while: they cost one comparison.
        worker_indices = [
            worker_index
            for worker_index, worker_load in enumerate(worker_loads)
            if now_ms > worker_load.saturated_until_ms
        ]
        return [
            worker_index
            for worker_index in worker_indices
            if self.has_capacity(workers[worker_index], worker_loads[worker_index], inputs, now_ms=now_ms)
        ]

    def has_capacity(self, worker: Worker, worker_load: WorkerLoad, inputs: ReleaseInputs, *, now_ms: float) -> bool:
        """Whether one more request may be sent to the worker."""
        if worker.in_flight >= self._max_in_flight:
            return False
        alternates = self._follows_scheduler and worker_load.scheduler.prefill_decode_interval > 0
        ahead_ms = max(self._ahead_ms, _ahead_of_cycle_ms(worker_load)) if alternates else self._ahead_ms
        if worker_load.queue.load_ms(now_ms, worker_load.speed) >= ahead_ms:
            worker_load.saturated_until_ms = worker_load.queue.below_ms(ahead_ms, worker_load.speed)
            return False
        if alternates or not self._theta:
            return True
        return worker.in_flight < self.decode_limit(worker_load, inputs, now_ms=now_ms)

    def decode_limit(self, worker_load: WorkerLoad, inputs: ReleaseInputs, *, now_ms: float) -> int:
        """c: decode may take about 1/θ of prefill's time, more when the queue is long."""
        share = (
            self._theta * inputs.answer_tokens * worker_load.step_ms / worker_load.mean_work_ms(inputs.uncached_tokens)
        )
        others = worker_load.others.requests if now_ms < worker_load.others.until_ms else 0
        return max(1, math.ceil(share * inputs.queue_pressure) - others)


def _ahead_of_cycle_ms(worker_load: WorkerLoad) -> float:
    """Least H for an engine that decodes between prefills."""
    scheduler = worker_load.scheduler
    decode_ms = scheduler.prefill_decode_interval * worker_load.step_ms
    tokens = min(scheduler.chunked_prefill_tokens, scheduler.max_prefill_tokens)
    full_batch_ms = worker_load.speed * worker_load.times.prefill_work_ms(0, tokens)
    return min(_AHEAD_PER_DECODE * decode_ms, full_batch_ms + decode_ms)
