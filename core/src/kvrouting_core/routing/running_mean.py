"""A mean that follows slow changes and starts from a guess."""

from __future__ import annotations

_LEAST_GAIN = 0.02


class RunningMean:
    """Gain max(.02, 1/(n + 3)) for the n-th observation: the guess weighs as much as two of them."""

    __slots__ = ("_observations", "value")

    def __init__(self, guess: float) -> None:
        self.value = guess
        self._observations = 0

    def learn(self, observed: float) -> None:
        """Takes one observation."""
        self._observations += 1
        self.value += max(_LEAST_GAIN, 1 / (self._observations + 3)) * (observed - self.value)
