"""Pearson's test of a sample against exact probabilities."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

_MIN_EXPECTED = 5.0
_QUANTILE = 4.75
"""Standard normal quantile of 1 − 1e-6: a right sample is rejected once in a million."""


def rejects(counts: Mapping[Hashable, int], probabilities: Mapping[Hashable, float]) -> bool:
    """Whether the counts are no sample of the distribution, at a level of 1e-6.

    Outcomes expected fewer than 5 times are pooled. The limit is the Wilson-Hilferty approximation of the quantile.
    """
    draws = sum(counts.values())
    if any(probabilities.get(outcome, 0.0) == 0.0 for outcome in counts):
        return True
    rare_expected = rare_counted = 0.0
    statistic, cells = 0.0, 0
    for outcome, probability in probabilities.items():
        expected, counted = probability * draws, counts.get(outcome, 0)
        if expected < _MIN_EXPECTED:
            rare_expected, rare_counted = rare_expected + expected, rare_counted + counted
        else:
            statistic, cells = statistic + (counted - expected) ** 2 / expected, cells + 1
    if rare_expected >= _MIN_EXPECTED:
        statistic, cells = statistic + (rare_counted - rare_expected) ** 2 / rare_expected, cells + 1
    freedom = max(1, cells - 1)
    spread = 2 / (9 * freedom)
    limit: float = freedom * (1 - spread + _QUANTILE * spread**0.5) ** 3
    return statistic > limit
