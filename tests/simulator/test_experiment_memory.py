"""KV tokens beside the weights: the arithmetic against the worker classes' own numbers."""

from __future__ import annotations

import pytest

from kvrouting_core.service_time import L40_CAPACITY_TOKENS, WORKER_CLASSES
from kvrouting_simulator.experiment import ScenarioError, build_scenario
from kvrouting_simulator.experiment.memory import SET_UPS, USUAL_FRACTION, capacity_at


@pytest.mark.parametrize(("fraction", "tokens"), L40_CAPACITY_TOKENS.items())
def test_an_l40_has_the_measured_tokens_and_the_arithmetic_agrees(fraction: float, tokens: int) -> None:
    assert capacity_at("L40-paper", fraction) == tokens
    assert SET_UPS["L40"].kv_tokens(fraction) == pytest.approx(tokens, rel=0.04)


def test_between_the_measured_points_it_is_linear() -> None:
    assert capacity_at("L40", 0.55) == (58_000 + 95_000) / 2


@pytest.mark.parametrize("name", ["H200", "H200-mixtral-8x7b", "H200x2-llama-70b", "H200x4-llama-70b"])
def test_the_classes_capacities_follow_from_weights_and_memory(name: str) -> None:
    assert capacity_at(name, USUAL_FRACTION) == pytest.approx(WORKER_CLASSES[name].capacity_tokens, rel=0.08)


def test_seventy_billion_parameters_do_not_fit_one_card() -> None:
    assert SET_UPS["H200-llama-70b"].kv_tokens(USUAL_FRACTION) < 0
    with pytest.raises(ValueError, match=r"memory_fraction 0.88 of H200-llama-70b leaves no KV cache"):
        capacity_at("H200-llama-70b", USUAL_FRACTION)


@pytest.mark.parametrize(
    ("worker", "message"),
    [
        ({"memory_fraction": 1.5}, "memory_fraction must be between 0 and 1, got 1.5"),
        ({"memory_fraction": 0.4}, "known from 0.5 to 0.9, got 0.4"),
        ({"memory_fraction": "much"}, "must be a number between 0 and 1, got 'much'"),
        ({"memory_fraction": 0.5, "capacity_tokens": 10}, "capacity_tokens or memory_fraction, not both"),
        ({"memory_fraction": 0.5, "worker_class": "A100"}, "not known for worker class 'A100'"),
    ],
)
def test_a_wrong_fraction_is_named(worker: dict[str, object], message: str) -> None:
    with pytest.raises(ScenarioError, match=message):
        build_scenario({"workers": [worker]})


def test_a_fraction_sets_the_capacity() -> None:
    (spec,) = build_scenario({"workers": [{"memory_fraction": 0.7}]}).workers
    assert spec.tokens == 131_000
