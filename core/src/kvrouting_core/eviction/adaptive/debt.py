"""How far the real cache is behind its ghost: Φ, and the safe mode that pays it back."""

from __future__ import annotations


class Debt:
    """Φ = Σ own loads − (1 + ε)·Σ the ghost's loads, never below −c·B and what is about to be loaded.

    Above β·B the mode is safe: only what the ghost does not hold is evicted, until Φ is at most β·B / 2. Then Φ is at
    most (1 + β)·B + p at any time, B the capacity and p the longest path; docs/eviction.md has the proof.
    """

    def __init__(self, *, capacity: int, epsilon: float, beta: float, credit: float, always_safe: bool = False) -> None:
        for name, value in (("epsilon", epsilon), ("beta", beta), ("credit", credit)):
            if value < 0:
                raise ValueError(f"{name} must not be negative, got {value}")
        self._weight = 1 + epsilon
        self._lowest = -credit * capacity
        self._limit = beta * capacity
        self._always_safe = always_safe
        self.phi = 0.0
        self.is_safe = always_safe
        self.own_loads = 0
        self.ghost_loads = 0
        self.safe_entries = 0

    def settle(self, *, own: int, ghost: int, announced: int = 0) -> None:
        """So many pages were loaded, by the real cache and by the ghost.

        announced: pages of admitted requests that are still to be loaded. The ghost has loaded them already, so they
        are kept out of the floor: else requests that are admitted together would lose what they are about to need.
        """
        self.own_loads += own
        self.ghost_loads += ghost
        self.phi = max(self._lowest - announced, self.phi + own - self._weight * ghost)
        if self._always_safe:
            return
        if not self.is_safe and self.phi > self._limit:
            self.is_safe = True
            self.safe_entries += 1
        elif self.is_safe and self.phi <= self._limit / 2:
            self.is_safe = False

    def forgive(self) -> None:
        """Both caches are empty: nothing is owed."""
        self.phi = 0.0
        self.is_safe = self._always_safe
