"""What every kind of workload offers."""

from __future__ import annotations

from typing import Protocol

from kvrouting_simulator.workloads.work_item import Client


class WorkloadSpec(Protocol):
    """A kind of workload with its numbers; a run's seed makes a client of it."""

    def client(self, *, seed: int) -> Client:
        """Same spec and seed: same requests at the same times."""
