"""What is believed of each worker of a pool as vectors over the workers, so that a decision costs no step for each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvrouting_core.routing.worker_load import WorkerLoad, WorkerLoadState

Vector = npt.NDArray[np.float64]


class PoolColumns:
    """The worker loads of one moment's workers, in order; `refresh` takes over what has changed since the last time.

    Each vector has the shape (workers,) and is a view that `refresh` changes; they are named as in `WorkerLoadState`.
    """

    def __init__(self, worker_loads: Sequence[WorkerLoad]) -> None:
        self._worker_loads = worker_loads
        self._versions = [-1] * len(worker_loads)
        self._table: Vector = np.empty((len(WorkerLoadState._fields), len(worker_loads)))
        columns = dict(zip(WorkerLoadState._fields, self._table, strict=True))
        self.a, self.b, self.speed = columns["a"], columns["b"], columns["speed"]
        self.relative_speed = columns["relative_speed"]
        self.step_ms, self.running = columns["step_ms"], columns["running"]
        self.sequences, self.running_limit = columns["sequences"], columns["running_limit"]
        self.others_until_ms = columns["others_until_ms"]
        self._total_ms, self._oldest_ms = columns["total_ms"], columns["oldest_ms"]
        self._since_ms = columns["since_ms"]
        self._drain = all(worker_load.queue.drain() is not None for worker_load in worker_loads)
        self.refresh()

    def refresh(self) -> None:
        """Reads the worker loads where something has happened."""
        versions = [worker_load.version for worker_load in self._worker_loads]
        if versions == self._versions:
            return
        for worker_index, (version, before) in enumerate(zip(versions, self._versions, strict=True)):
            if version != before:
                self._table[:, worker_index] = self._worker_loads[worker_index].state()
        self._versions = versions

    def queues_ms(self, now_ms: float) -> Vector:
        """P of each, own requests only; a new vector."""
        if not self._drain:
            return np.array(
                [worker_load.queue.load_ms(now_ms, worker_load.speed) for worker_load in self._worker_loads]
            )
        done_ms = np.minimum(now_ms - self._since_ms, self._oldest_ms * self.speed)
        queues_ms: Vector = self._total_ms * self.speed - done_ms
        return np.maximum(queues_ms, 0.0, out=queues_ms)

    def prefill_ms(self, tokens: float) -> Vector:
        """What so many new tokens take on each, with nothing cached, at its speed."""
        work_ms: Vector = self.speed * tokens * (self.a + self.b * tokens / 2)
        return work_ms
