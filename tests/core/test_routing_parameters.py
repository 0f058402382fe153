"""What a policy can be told, and what it answers to nonsense."""

from __future__ import annotations

import random

import pytest

from kvrouting_core.routing.parameters import LbgrParameters, PaperParameters, parse_parameters
from kvrouting_core.routing.policy import AdmissionLimits
from kvrouting_core.routing.registry import POLICY_NAMES, build_policy
from tests.fakes.routing_pool import SetCache


def build(name: str, **parameters: object) -> str:
    policy = build_policy(
        name,
        parameters,
        cache=SetCache(),
        block_size_tokens=64,
        rng=random.Random(1),
        limits=AdmissionLimits(),
    )
    return policy.name


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_each_policy_is_built_under_its_name(name: str) -> None:
    assert build(name) == name


def test_an_unknown_policy_is_named_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'lbgrr'; known: lbgr, lbgr-paper, cache_aware, .*random"):
        build("lbgrr")


@pytest.mark.parametrize(
    ("name", "parameter", "known"),
    [
        ("lbgr", "late_bindin", "binding, release_ahead_ms"),
        ("lbgr-paper", "price", "cached_ms_per_token"),
        ("cache_aware", "threshold", "match_threshold"),
        ("random", "seed", "none"),
    ],
)
def test_an_unknown_parameter_is_named_with_the_known_ones(name: str, parameter: str, known: str) -> None:
    with pytest.raises(ValueError, match=f"policy '{name}' has no parameter '{parameter}'; known: {known}"):
        build(name, **{parameter: 1})


@pytest.mark.parametrize(
    ("name", "parameter", "value", "message"),
    [
        ("lbgr", "price", "high", "price is 'high'|parameter price is 'high'; give a number"),
        ("lbgr", "price", -1, "price is -1.0; give a number of at least 0"),
        ("lbgr", "price", float("nan"), "price is nan"),
        ("lbgr", "release_ahead_ms", 0, "release_ahead_ms is 0.0; give a number of at least 1"),
        ("lbgr", "queue", "fifo", "queue is 'fifo'; known: 'drained', 'decayed'"),
        ("lbgr", "queue", 3, "parameter queue is 3; give a text"),
        ("lbgr", "price_queue", "shortest", "price_queue is 'shortest'; known: 'least', 'mean', 'own'"),
        ("lbgr", "limit_rises", 2, "parameter limit_rises is 2; give 'on' or 'off'"),
        ("lbgr", "residual", "maybe", "parameter residual is 'maybe'; give 'on' or 'off'"),
        ("lbgr", "exploration_share", 0.9, "exploration_share is 0.9"),
        ("lbgr", "exploration_requests", 1.5, "exploration_requests is 1.5; give a whole number"),
        ("lbgr", "decay_factor", 1, "decay_factor is 1.0; give a number between 0 and 1"),
        ("lbgr", "default_worker_class", "T4", "unknown worker class 'T4'; known: L40"),
        ("lbgr-paper", "learning_rate", 2, "learning_rate is 2.0"),
        ("cache_aware", "match_threshold", 50, "match_threshold is 50.0; a share is 0 to 1"),
        ("cache_aware", "imbalance_ratio", True, "imbalance_ratio is True; give a number"),
    ],
)
def test_a_bad_value_is_named_with_the_fix(name: str, parameter: str, value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(name, **{parameter: value})


def test_values_may_come_as_text() -> None:
    parsed = parse_parameters(
        LbgrParameters, "lbgr", {"price": "2", "residual": "off", "exploration_requests": "4", "queue": "decayed"}
    )
    assert parsed == LbgrParameters(price=2.0, residual=False, exploration_requests=4, queue="decayed")
    assert parse_parameters(LbgrParameters, "lbgr", {"price": "backlog"}).price == "backlog"
    assert parse_parameters(PaperParameters, "lbgr-paper", {"learning_rate": "0.1"}).learning_rate == 0.1


def test_a_block_size_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="block_size_tokens is 0"):
        build_policy(
            "random", {}, cache=SetCache(), block_size_tokens=0, rng=random.Random(1), limits=AdmissionLimits()
        )
