"""μ: what a millisecond of new prefill costs those who come later."""

from __future__ import annotations

from typing import Protocol

from kvrouting_core.routing.estimator import PoolState


class Pricing(Protocol):
    """How μ is set for one decision."""

    def factor(self, pool: PoolState) -> float:
        """μ, at least 0."""


class ConstantPrice:
    """Always the same; 0 is the paper."""

    __slots__ = ("_factor",)

    def __init__(self, factor: float) -> None:
        self._factor = factor

    def factor(self, pool: PoolState) -> float:  # noqa: ARG002 - other prices look at the pool
        """As given."""
        return self._factor


class BacklogPrice:
    """μ = (q + ρ)/(1 − ρ), at least the floor.

    A millisecond of work delays those who wait now and those who arrive until the backlog is gone: with load ρ that
    is (q + ρ)/(1 − ρ) requests, q the queue of the least loaded worker, for idle capacity costs nobody time.
    """

    __slots__ = ("_floor",)

    def __init__(self, floor: float) -> None:
        self._floor = floor

    def factor(self, pool: PoolState) -> float:
        """As the backlog is now."""
        busy = pool.busy_share
        return max(self._floor, (pool.shortest_queue + busy) / (1 - busy))
