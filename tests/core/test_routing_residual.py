"""The residual learns what the prediction misses, and can do no lasting harm."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouting_core.routing.events import Outcome
from kvrouting_core.routing.residual import PoolResidual, Regression, WorkerResidual, dot, features
from tests.fakes.routing_pool import RoutingPool


def observe(residual: WorkerResidual, target_ms: float, *, count: int, now_ms: float = 0.0) -> None:
    for number in range(count):
        residual.learn(features(0, 2000, 0), target_ms, 400.0, now_ms=now_ms + number)


def value_ms(residual: WorkerResidual, now_ms: float, *, prediction_ms: float = 400.0) -> float:
    return residual.value_ms(0, 2000, 0, prediction_ms, now_ms)


def test_regression_finds_a_linear_law() -> None:
    rng, regression, law = random.Random(1), Regression(), (40.0, -25.0, 60.0, 10.0)
    for _ in range(600):
        phi = (1.0, rng.random() * 2, rng.random() * 2, rng.random() * 3)
        regression.learn(phi, dot(law, phi) + rng.gauss(0, 1))
    assert regression.weights == pytest.approx(law, abs=2.0)


def test_regression_stays_finite_without_variety() -> None:
    regression = Regression()
    for _ in range(20_000):
        regression.learn((1.0, 0.0, 0.5, 0.0), 100.0)
    assert dot(regression.weights, (1.0, 0.0, 0.5, 0.0)) == pytest.approx(100.0, rel=0.01)
    regression.learn((1.0, 2.0, 0.1, 3.0), 100.0)
    assert all(abs(w) < 1000 for w in regression.weights)


@given(
    st.lists(st.tuples(st.floats(0, 8000), st.floats(1, 8000), st.floats(0, 1e5), st.floats(-1e5, 1e7)), max_size=30)
)
def test_the_residual_is_bounded_whatever_happened(seen: list[tuple[float, float, float, float]]) -> None:
    residual = WorkerResidual(PoolResidual())
    for number, (h, u, queue_ms, missed_ms) in enumerate(seen):
        residual.learn(features(h, u, queue_ms), missed_ms, 0.1 * u + queue_ms, now_ms=float(number))
    for h, u, queue_ms, _ in [*seen, (0.0, 1.0, 0.0, 0.0)]:
        prediction_ms = 0.1 * u + queue_ms
        value = residual.value_ms(h, u, queue_ms, prediction_ms, 100.0)
        assert -0.5 * prediction_ms <= value <= 0.5 * prediction_ms + 50


def test_many_observations_are_believed_and_few_are_not() -> None:
    few, many = WorkerResidual(PoolResidual()), WorkerResidual(PoolResidual())
    observe(few, 100.0, count=1)
    observe(many, 100.0, count=100)
    assert 0 < value_ms(few, 1.0) < 30
    assert value_ms(many, 100.0) > 70


def test_a_worker_without_observations_is_judged_as_the_pool() -> None:
    pool = PoolResidual()
    seen, unseen = WorkerResidual(pool), WorkerResidual(pool)
    observe(seen, 100.0, count=100)
    assert value_ms(unseen, 100.0) == pytest.approx(value_ms(seen, 100.0), rel=0.2)
    assert value_ms(unseen, 100.0) > 60


def test_a_worker_that_differs_from_the_pool_is_told_apart() -> None:
    pool = PoolResidual()
    good, bad = WorkerResidual(pool), WorkerResidual(pool)
    for number in range(100):
        observe(good, 0.0, count=1, now_ms=number * 10.0)
        observe(bad, 200.0, count=1, now_ms=number * 10.0)
    assert value_ms(bad, 1000.0) - value_ms(good, 1000.0) > 100


def test_without_observations_it_fades_to_nothing() -> None:
    residual = WorkerResidual(PoolResidual())
    observe(residual, 100.0, count=100)
    fresh = value_ms(residual, 200.0)
    assert value_ms(residual, 60_000.0) < fresh / 2
    assert value_ms(residual, 400_000.0) == pytest.approx(0.0, abs=0.01)


class TestInThePolicy:
    def served(self, pool: RoutingPool, request_id: str, latency_ms: float, outcome: Outcome) -> None:
        pool.decide(request_id, tokens=4096)
        pool.now_ms += latency_ms
        pool.end(request_id, outcome, output_tokens=1 if outcome is Outcome.COMPLETED else None)

    def test_a_completed_request_is_compared_with_its_prediction(self) -> None:
        pool = RoutingPool("lbgr", "a", parameters={"residual": "on", "initial_output_tokens": 1})
        foreseen_ms = pool.decide("probe", tokens=4096).chosen.service_ms
        pool.end("probe", Outcome.CANCELLED)
        for number in range(60):
            self.served(pool, f"r{number}", foreseen_ms + 150, Outcome.COMPLETED)
        chosen = pool.decide("last", tokens=4096).chosen
        assert chosen.residual_ms == pytest.approx(150, rel=0.25)
        assert chosen.prediction_ms == pytest.approx(foreseen_ms + 150, rel=0.1)
        assert pool.belief("a").observations == 60

    @pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.REJECTED, Outcome.CANCELLED])
    def test_what_did_not_complete_teaches_nothing(self, outcome: Outcome) -> None:
        pool = RoutingPool("lbgr", "a", parameters={"residual": "on"})
        for number in range(20):
            self.served(pool, f"r{number}", 9000.0, outcome)
        assert pool.decide("last", tokens=4096).chosen.residual_ms == 0
        assert pool.belief("a").observations == 0

    def test_a_long_answer_is_not_held_against_the_worker(self) -> None:
        pool = RoutingPool("lbgr", "a", parameters={"residual": "on", "initial_output_tokens": 4})
        prefill_ms = pool.decide("probe", tokens=4096, max_output_tokens=1).chosen.service_ms
        pool.end("probe", Outcome.CANCELLED)
        for number in range(30):
            pool.decide(f"r{number}", tokens=4096)
            pool.now_ms += prefill_ms + 499 * 21.05
            pool.end(f"r{number}", output_tokens=500)
        assert pool.decide("last", tokens=4096, max_output_tokens=1).chosen.residual_ms == pytest.approx(0, abs=1)

    def test_what_ended_after_a_restart_teaches_nothing(self) -> None:
        pool = RoutingPool("lbgr", "a", parameters={"residual": "on"})
        pool.decide("r", tokens=4096)
        pool.join("a", restarted=True)
        pool.now_ms += 90_000
        pool.end("r", output_tokens=4)
        assert pool.belief("a").observations == 0

    def test_it_is_off_unless_it_is_asked_for(self) -> None:
        pool = RoutingPool("lbgr", "a")
        for number in range(20):
            self.served(pool, f"r{number}", 9000.0, Outcome.COMPLETED)
        assert pool.decide("last", tokens=4096).chosen.residual_ms == 0
