"""Prefixes that are being prefilled count for the worker that has them, as long as they are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouting_core.routing.events import Outcome
from kvrouting_core.routing.prefix_credit import InFlightPrefixes
from tests.fakes.routing_pool import BLOCK_TOKENS, RoutingPool, prompt_blocks

PROMPT = prompt_blocks(1, 128)

depths = st.integers(0, 128)


@given(credited=st.lists(depths, max_size=5), held=depths, shared=depths)
def test_depth_is_that_of_a_plain_walk(credited: list[int], held: int, shared: int) -> None:
    """Requests leave the blocks beyond what the index reported, and the index has not shrunk since."""
    credit = InFlightPrefixes()
    reported = min(held, shared)
    for depth in credited:
        credit.add(PROMPT[reported:depth])
    asked = prompt_blocks(2, 128, prefix=PROMPT[:shared])
    walked = reported
    while walked < len(asked) and asked[walked] in credit.counts:
        walked += 1
    assert credit.depth(asked, reported) == walked


def test_a_block_counts_until_its_last_request_is_over() -> None:
    credit = InFlightPrefixes()
    credit.add(PROMPT)
    credit.add(PROMPT[:64])
    credit.remove(PROMPT)
    assert credit.depth(PROMPT, 0) == 64
    assert len(credit) == 64
    credit.remove(PROMPT[:64])
    assert credit.depth(PROMPT, 0) == len(credit) == 0


def test_taking_back_what_was_never_credited_is_an_error() -> None:
    with pytest.raises(KeyError):
        InFlightPrefixes().remove(PROMPT)


@pytest.mark.parametrize("policy", ["lbgr", "lbgr-paper", "cache_aware"])
class TestCreditOfOneRequest:
    def credited(self, pool: RoutingPool) -> dict[str, int]:
        decision = pool.decide("probe", blocks=PROMPT)
        pool.end("probe", Outcome.CANCELLED)
        return {c.worker: c.credited_tokens for c in decision.candidates}

    def test_it_counts_for_the_chosen_worker_alone(self, policy: str) -> None:
        pool = RoutingPool(policy, "a", "b")
        chosen = pool.decide("r", blocks=PROMPT).worker
        credited = self.credited(pool)
        assert credited.pop(chosen) == len(PROMPT) * BLOCK_TOKENS
        assert set(credited.values()) == {0}

    def test_it_ends_with_the_request(self, policy: str) -> None:
        pool = RoutingPool(policy, "a", "b")
        pool.decide("r", blocks=PROMPT)
        pool.end("r", Outcome.FAILED)
        assert set(self.credited(pool).values()) == {0}

    def test_it_ends_when_the_real_blocks_arrive(self, policy: str) -> None:
        pool = RoutingPool(policy, "a", "b")
        pool.decide("r", blocks=PROMPT)
        pool.prefix_arrived("r")
        assert set(self.credited(pool).values()) == {0}
        pool.end("r")

    def test_it_is_void_after_a_restart(self, policy: str) -> None:
        pool = RoutingPool(policy, "a", "b")
        chosen = pool.decide("r", blocks=PROMPT).worker
        pool.join(chosen, restarted=True)
        assert set(self.credited(pool).values()) == {0}
        pool.prefix_arrived("r")
        pool.end("r", Outcome.FAILED)
        assert set(self.credited(pool).values()) == {0}

    def test_it_survives_a_pause(self, policy: str) -> None:
        pool = RoutingPool(policy, "a")
        pool.decide("r", blocks=PROMPT)
        pool.pause("a")
        pool.join("a")
        assert self.credited(pool) == {"a": len(PROMPT) * BLOCK_TOKENS}


def test_credit_can_be_turned_off() -> None:
    pool = RoutingPool("lbgr", "a", parameters={"in_flight_credit": "off"})
    pool.decide("r", blocks=PROMPT)
    assert pool.decide("s", blocks=PROMPT).chosen.credited_tokens == 0


@pytest.mark.parametrize("suffix_tokens", [20, 40])
def test_a_burst_of_siblings_meets_on_at_most_two_workers(suffix_tokens: int) -> None:
    """64 questions about one new document of 8k tokens arrive at once at four idle workers."""
    for seed in range(5):
        pool = RoutingPool("lbgr", "a", "b", "c", "d", seed=seed)
        tokens = len(PROMPT) * BLOCK_TOKENS + suffix_tokens
        chosen = [pool.decide(f"r{i}", blocks=PROMPT, tokens=tokens).worker for i in range(64)]
        assert len(set(chosen)) <= 2


def test_without_credit_the_burst_fans_out() -> None:
    pool = RoutingPool("lbgr", "a", "b", "c", "d", parameters={"in_flight_credit": "off"})
    chosen = [pool.decide(f"r{i}", blocks=PROMPT, tokens=8212).worker for i in range(64)]
    assert len(set(chosen)) == 4
