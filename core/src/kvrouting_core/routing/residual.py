"""r: what the prediction s + P misses, learned online over φ = (1, h, u, P)."""

from __future__ import annotations

import math

Features = tuple[float, float, float, float]
Weights = tuple[float, float, float, float]

NO_WEIGHTS: Weights = (0.0, 0.0, 0.0, 0.0)

# Scales that bring each feature to order one.
_PROMPT_SCALE_TOKENS = 4096.0
_QUEUE_SCALE_MS = 1000.0

_FORGETTING = 0.98
# With forgetting, directions that are not excited let the covariance grow without limit; beyond this trace nothing
# is forgotten.
_LARGEST_TRACE = 8.0
# A share and a constant of the prediction that the residual may not exceed.
_BOUND_SHARE = 0.5
_BOUND_MS = 50.0
# Observations that weigh as much as the belief that there is no residual.
_PRIOR_OBSERVATIONS = 8.0
_MOST_OBSERVATIONS = 50.0
_MEMORY_MS = 20_000.0
# The weights change little within this time and are not combined anew.
_COMBINED_LIFETIME_MS = 1000.0


def features(cached_tokens: float, uncached_tokens: float, queue_ms: float) -> Features:
    """φ = (1, h, u, P), each of order one."""
    return (
        1.0,
        cached_tokens / _PROMPT_SCALE_TOKENS,
        uncached_tokens / _PROMPT_SCALE_TOKENS,
        queue_ms / _QUEUE_SCALE_MS,
    )


def dot(weights: Weights, phi: Features) -> float:
    """θᵀφ."""
    return weights[0] * phi[0] + weights[1] * phi[1] + weights[2] * phi[2] + weights[3] * phi[3]


def bound_ms(prediction_ms: float) -> float:
    """The most that the residual may add to a prediction s + P; it takes off the share alone, so E stays positive."""
    return _BOUND_SHARE * prediction_ms + _BOUND_MS


class GradientRegression:
    """The paper's: one step down the gradient of (E − Ê)² per observation, normalised by φ's length."""

    __slots__ = ("_rate", "observations", "weights")

    def __init__(self, learning_rate: float) -> None:
        self._rate = learning_rate
        self.observations = 0
        self.weights: Weights = NO_WEIGHTS

    def learn(self, phi: Features, target_ms: float) -> None:
        """target_ms: what s + P missed."""
        step = self._rate * (target_ms - dot(self.weights, phi)) / dot(phi, phi)
        w = self.weights
        self.weights = (w[0] + step * phi[0], w[1] + step * phi[1], w[2] + step * phi[2], w[3] + step * phi[3])
        self.observations += 1


class Regression:
    """Recursive least squares with forgetting, from a prior of weights 0 and unit covariance."""

    __slots__ = ("_covariance", "weights")

    def __init__(self) -> None:
        self.weights: Weights = NO_WEIGHTS
        self._covariance = [[1.0 if i == j else 0.0 for j in range(4)] for i in range(4)]

    def learn(self, phi: Features, target_ms: float) -> None:
        """Takes one observation."""
        covariance = self._covariance
        spread = [sum(c * x for c, x in zip(row, phi, strict=True)) for row in covariance]
        trace = covariance[0][0] + covariance[1][1] + covariance[2][2] + covariance[3][3]
        forgetting = _FORGETTING if trace < _LARGEST_TRACE else 1.0
        scale = forgetting + sum(s * x for s, x in zip(spread, phi, strict=True))
        error = (target_ms - dot(self.weights, phi)) / scale
        w = self.weights
        self.weights = (
            w[0] + error * spread[0], w[1] + error * spread[1], w[2] + error * spread[2], w[3] + error * spread[3],
        )  # fmt: skip
        for i, row in enumerate(covariance):
            share = spread[i] / scale
            for j in range(4):
                row[j] = (row[j] - share * spread[j]) / forgetting


class _Evidence:
    """A count of observations that fades when none come."""

    __slots__ = ("_as_of_ms", "_count")

    def __init__(self) -> None:
        self._count = 0.0
        self._as_of_ms = 0.0

    def add(self, *, now_ms: float) -> None:
        self._count = min(_MOST_OBSERVATIONS, self._faded(now_ms) + 1)
        self._as_of_ms = now_ms

    def trust(self, *, now_ms: float) -> float:
        """0 without fresh observations, towards 1 with many."""
        count = self._faded(now_ms)
        return count / (count + _PRIOR_OBSERVATIONS)

    def _faded(self, now_ms: float) -> float:
        return self._count * math.exp(-max(0.0, now_ms - self._as_of_ms) / _MEMORY_MS)


class PoolResidual:
    """The pool's mean regression: what every prediction misses, whichever the worker."""

    __slots__ = ("_evidence", "_regression")

    def __init__(self) -> None:
        self._regression = Regression()
        self._evidence = _Evidence()

    def weights(self, *, now_ms: float) -> Weights:
        """θ of the pool, shrunk to 0 as far as observations are few or old."""
        return _scaled(self._regression.weights, self._evidence.trust(now_ms=now_ms))

    def learn(self, phi: Features, target_ms: float, *, now_ms: float) -> float:
        """Takes one observation of any worker. Returns: what the pool's regression does not explain of it."""
        unexplained_ms = target_ms - dot(self._regression.weights, phi)
        self._regression.learn(phi, target_ms)
        self._evidence.add(now_ms=now_ms)
        return unexplained_ms


class WorkerResidual:
    """One worker's regression, on what the pool's leaves over.

    A worker without fresh observations is judged as the pool, and an unobserved pool by s + P alone. So a worker that
    was avoided after bad luck is tried again: its bias fades, where a lone bias would keep it avoided for ever.
    """

    __slots__ = ("_combined", "_combined_ms", "_evidence", "_pool", "_regression")

    def __init__(self, pool: PoolResidual) -> None:
        self._pool = pool
        self._regression = Regression()
        self._evidence = _Evidence()
        self._combined: Weights = NO_WEIGHTS
        self._combined_ms = -math.inf

    def value_ms(
        self, cached_tokens: float, uncached_tokens: float, queue_ms: float, prediction_ms: float, now_ms: float
    ) -> float:
        """r, within its bound. prediction_ms: s + P. The weights are as of at most a second ago."""
        if now_ms - self._combined_ms >= _COMBINED_LIFETIME_MS:
            self._combine(now_ms)
        constant, per_cached, per_uncached, per_queue = self._combined
        value = (
            constant
            + (per_cached * cached_tokens + per_uncached * uncached_tokens) / _PROMPT_SCALE_TOKENS
            + per_queue * queue_ms / _QUEUE_SCALE_MS
        )
        if value > 0:
            most = _BOUND_SHARE * prediction_ms + _BOUND_MS
            return min(most, value)
        least = -_BOUND_SHARE * prediction_ms
        return max(least, value)

    def _combine(self, now_ms: float) -> None:
        own = _scaled(self._regression.weights, self._evidence.trust(now_ms=now_ms))
        pool = self._pool.weights(now_ms=now_ms)
        self._combined = (own[0] + pool[0], own[1] + pool[1], own[2] + pool[2], own[3] + pool[3])
        self._combined_ms = now_ms

    def learn(self, phi: Features, target_ms: float, prediction_ms: float, *, now_ms: float) -> None:
        """target_ms: realised latency less s + P; what exceeds twice the bound counts as twice the bound."""
        limit = 2 * bound_ms(prediction_ms)
        unexplained_ms = self._pool.learn(phi, min(limit, max(-limit, target_ms)), now_ms=now_ms)
        self._regression.learn(phi, unexplained_ms)
        self._evidence.add(now_ms=now_ms)
        self._combined_ms = -math.inf


def _scaled(weights: Weights, factor: float) -> Weights:
    return (weights[0] * factor, weights[1] * factor, weights[2] * factor, weights[3] * factor)
