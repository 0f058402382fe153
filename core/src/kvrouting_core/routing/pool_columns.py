"""What is believed of each worker of a pool as vectors over the workers, so that a decision costs no step for each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvrouting_core.routing.station import Station, StationState

Vector = npt.NDArray[np.float64]


class PoolColumns:
    """The stations of one moment's workers, in order; `refresh` takes over what has changed since the last time.

    Each vector has the shape (workers,) and is a view that `refresh` changes; they are named as in `StationState`.
    """

    def __init__(self, stations: Sequence[Station]) -> None:
        self._stations = stations
        self._versions = [-1] * len(stations)
        self._table: Vector = np.empty((len(StationState._fields), len(stations)))
        columns = dict(zip(StationState._fields, self._table, strict=True))
        self.a, self.b, self.speed = columns["a"], columns["b"], columns["speed"]
        self.relative_speed = columns["relative_speed"]
        self.step_ms, self.running = columns["step_ms"], columns["running"]
        self.sequences, self.running_limit = columns["sequences"], columns["running_limit"]
        self.others_until_ms = columns["others_until_ms"]
        self._total_ms, self._oldest_ms = columns["total_ms"], columns["oldest_ms"]
        self._since_ms = columns["since_ms"]
        self._drain = all(station.queue.drain() is not None for station in stations)
        self.refresh()

    def refresh(self) -> None:
        """Reads the stations where something has happened."""
        versions = [station.version for station in self._stations]
        if versions == self._versions:
            return
        for place, (version, before) in enumerate(zip(versions, self._versions, strict=True)):
            if version != before:
                self._table[:, place] = self._stations[place].state()
        self._versions = versions

    def queues_ms(self, now_ms: float) -> Vector:
        """P of each, own requests only; a new vector."""
        if not self._drain:
            return np.array([station.queue.load_ms(now_ms, station.speed) for station in self._stations])
        done_ms = np.minimum(now_ms - self._since_ms, self._oldest_ms * self.speed)
        queues_ms: Vector = self._total_ms * self.speed - done_ms
        return np.maximum(queues_ms, 0.0, out=queues_ms)

    def prefill_ms(self, tokens: float) -> Vector:
        """What so many new tokens take on each, with nothing cached, at its speed."""
        work_ms: Vector = self.speed * tokens * (self.a + self.b * tokens / 2)
        return work_ms
