"""Linear regression with coefficients of at least 0 that outliers do not move, and its standard errors."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from sklearn.linear_model import LinearRegression

Floats = NDArray[np.float64]

# Iteratively reweighted least squares, each step with scikit-learn's non-negative least squares (its HuberRegressor
# knows no bounds): first towards the least absolute deviations, which gross outliers do not move, then with Tukey's
# bisquare at its usual width, which gives them no weight at all and is nearly as good as least squares without them.
_ABSOLUTE_STEPS = 20
_BISQUARE_STEPS = 10
_BISQUARE_WIDTH = 4.685
_TO_STANDARD_DEVIATION = 1.4826  # of the median absolute deviation of normal errors
_BOOTSTRAP_STEPS = 5
BOOTSTRAPS = 50


@dataclass(frozen=True, kw_only=True, slots=True)
class RobustFit:
    """standard_errors: by bootstrap over rows. loss: mean absolute weighted residual."""

    coefficients: Floats
    standard_errors: Floats
    loss: float


def robust_fit(design: Floats, target: Floats, weights: Floats, *, seed: int) -> RobustFit:
    """target ≈ design @ coefficients. weights: of the rows' squared errors. seed: of the bootstrap."""
    scaled, units = _scaled(design)
    root = np.sqrt(weights)
    rows, values = scaled * root[:, None], target * root
    coefficients = _bisquare(rows, values, _least_absolute(rows, values), steps=_BISQUARE_STEPS)
    rng = np.random.default_rng(seed)
    resampled = []
    for _ in range(BOOTSTRAPS):
        drawn = rng.integers(0, len(values), len(values))
        resampled.append(_bisquare(rows[drawn], values[drawn], coefficients, steps=_BOOTSTRAP_STEPS))
    return RobustFit(
        coefficients=coefficients / units,
        standard_errors=np.std(resampled, axis=0, ddof=1) / units,
        loss=_loss(rows, values, coefficients),
    )


def robust_loss(design: Floats, target: Floats, weights: Floats) -> float:
    """Mean absolute weighted residual of the fit, to choose between designs."""
    scaled, _ = _scaled(design)
    root = np.sqrt(weights)
    rows, values = scaled * root[:, None], target * root
    return _loss(rows, values, _least_absolute(rows, values))


def _scaled(design: Floats) -> tuple[Floats, Floats]:
    """Columns of size 1: what is a token and what is a pair of tokens differ by orders of magnitude."""
    units = np.sqrt(np.mean(design**2, axis=0))
    units[units == 0] = 1.0
    return design / units, units


def _loss(rows: Floats, values: Floats, coefficients: Floats) -> float:
    return float(np.mean(np.abs(values - rows @ coefficients)))


def _least_squares(rows: Floats, values: Floats, weights: Floats) -> Floats:
    model = LinearRegression(positive=True, fit_intercept=False).fit(rows, values, sample_weight=weights)
    return np.asarray(model.coef_, dtype=np.float64)


def _least_absolute(rows: Floats, values: Floats) -> Floats:
    coefficients = _least_squares(rows, values, np.ones(len(values)))
    floor = 1e-6 * max(float(np.median(np.abs(values))), 1e-12)
    for _ in range(_ABSOLUTE_STEPS):
        residuals = np.abs(values - rows @ coefficients)
        coefficients = _least_squares(rows, values, 1 / np.maximum(residuals, floor))
    return coefficients


def _bisquare(rows: Floats, values: Floats, coefficients: Floats, *, steps: int) -> Floats:
    floor = 1e-6 * max(float(np.median(np.abs(values))), 1e-12)
    for _ in range(steps):
        residuals = np.abs(values - rows @ coefficients)
        width = _BISQUARE_WIDTH * max(_TO_STANDARD_DEVIATION * float(np.median(residuals)), floor)
        weights = np.maximum(0.0, 1 - (residuals / width) ** 2) ** 2
        coefficients = _least_squares(rows, values, weights)
    return coefficients
