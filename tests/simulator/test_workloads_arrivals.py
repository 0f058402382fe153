"""Arrivals by chance and recorded ones."""

from __future__ import annotations

import numpy as np
import pytest

from kvrouting_simulator.workloads import Arrivals, GammaArrivals, PoissonArrivals, RecordedArrivals


def gaps(arrivals: Arrivals, count: int = 20_001) -> np.ndarray:
    return np.diff(arrivals.times_ms(count, np.random.default_rng(3)))


def test_poisson_gaps_have_the_rate_and_a_cv_of_one() -> None:
    values = gaps(PoissonArrivals(rate_per_s=12))
    assert values.mean() == pytest.approx(1000 / 12, rel=0.03)
    assert values.std() / values.mean() == pytest.approx(1, rel=0.03)


@pytest.mark.parametrize("cv", [0.5, 1, 3])
def test_gamma_gaps_have_the_rate_and_the_cv(cv: float) -> None:
    values = gaps(GammaArrivals(rate_per_s=12, cv=cv))
    assert values.mean() == pytest.approx(1000 / 12, rel=0.06)
    assert values.std() / values.mean() == pytest.approx(cv, rel=0.08)


@pytest.mark.parametrize("arrivals", [PoissonArrivals(), GammaArrivals(), RecordedArrivals(recorded_ms=[7.0, 9.0])])
def test_the_first_request_arrives_at_zero(arrivals: Arrivals) -> None:
    assert arrivals.times_ms(2, np.random.default_rng(1))[0] == 0


def test_recorded_times_keep_their_gaps_and_speed_shrinks_them() -> None:
    arrivals = RecordedArrivals(recorded_ms=[100.0, 300.0, 1000.0], speed=2)
    assert arrivals.times_ms(3, np.random.default_rng(0)).tolist() == [0, 100, 450]


def test_too_few_recorded_times_are_refused() -> None:
    with pytest.raises(ValueError, match="3 arrivals are wanted, the trace has 1"):
        RecordedArrivals(recorded_ms=[0.0]).times_ms(3, np.random.default_rng(0))


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="rate_per_s must be positive, got 0"):
        PoissonArrivals(rate_per_s=0)
    with pytest.raises(ValueError, match="cv must be positive, got -1"):
        GammaArrivals(cv=-1)
    with pytest.raises(ValueError, match="speed must be positive, got 0"):
        RecordedArrivals(recorded_ms=[], speed=0)
