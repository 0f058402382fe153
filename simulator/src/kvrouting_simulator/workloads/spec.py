"""What every kind of workload offers, and the checks of its numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvrouting_simulator.workloads.work_item import Client


class WorkloadSpec(Protocol):
    """A kind of workload with its numbers; a run's seed makes a client of it."""

    def client(self, *, seed: int) -> Client:
        """Same spec and seed: same requests at the same times."""


def at_least(least: float, name: str, value: float) -> None:
    """Raises: ValueError naming the value if it is smaller."""
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")


def one_of(choices: Sequence[str], name: str, value: str) -> None:
    """Raises: ValueError naming the value and the choices if it is none of them."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
