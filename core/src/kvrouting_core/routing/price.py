"""μ: what a millisecond of new prefill costs those who come later."""

from __future__ import annotations

from typing import Protocol


class Pricing(Protocol):
    """How μ is set for one decision."""

    def factor(self, shortest_queue: float, busy_share: float, *, sharing: int = 1) -> float:
        """μ, at least 0.

        shortest_queue: q, P of the least loaded worker in requests of mean size. busy_share: ρ. sharing: n, waiting
        requests that one prefill of their common prefix would serve.
        """


class ConstantPrice:
    """Always the same; 0 is the paper."""

    __slots__ = ("_factor",)

    def __init__(self, factor: float) -> None:
        self._factor = factor

    def factor(self, shortest_queue: float, busy_share: float, *, sharing: int = 1) -> float:  # noqa: ARG002
        """As given."""
        return self._factor


class BacklogPrice:
    """μ = (q + ρ)/(1 − ρ)/n, at least the floor.

    A millisecond of work delays those who wait now and those who arrive until the backlog is gone: with load ρ that
    is (q + ρ)/(1 − ρ) requests, q the queue of the least loaded worker, for idle capacity costs nobody time. Work that
    n requests share is one work.
    """

    __slots__ = ("_floor",)

    def __init__(self, floor: float) -> None:
        self._floor = floor

    def factor(self, shortest_queue: float, busy_share: float, *, sharing: int = 1) -> float:
        """As the backlog is now."""
        return max(self._floor, (shortest_queue + busy_share) / (1 - busy_share) / sharing)
