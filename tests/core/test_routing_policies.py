"""How each policy chooses, and what every decision carries."""

from __future__ import annotations

import collections
import json

import pytest

from kvrouting_core.identity import WorkerId
from kvrouting_core.routing.decision import Reason, RefusalReason
from kvrouting_core.routing.events import Outcome
from kvrouting_core.routing.policy import AdmissionLimits
from kvrouting_core.routing.registry import POLICY_NAMES
from tests.fakes.routing_pool import BLOCK_TOKENS, RoutingPool, prompt_blocks

PROMPT = prompt_blocks(1, 32)
FOUR = ("a", "b", "c", "d")
PAPER_FORM = {"price": 0, "decode_price": 0, "residual": "off", "queue": "decayed"}


def spread(pool: RoutingPool, count: int, **request: object) -> collections.Counter[str]:
    """Where `count` requests go, each of which ends before the next comes."""
    chosen: collections.Counter[str] = collections.Counter()
    for number in range(count):
        chosen[pool.decide(f"s{number}", **request).worker] += 1
        pool.end(f"s{number}", Outcome.CANCELLED)
    return chosen


class TestEveryPolicy:
    @pytest.mark.parametrize("policy", POLICY_NAMES)
    def test_a_decision_shows_every_candidate_and_is_ready_for_json(self, policy: str) -> None:
        pool = RoutingPool(policy, *FOUR)
        pool.pause("c")
        decision = pool.decide("r", blocks=PROMPT, excluded=["d"])
        assert [c.worker for c in decision.candidates] == ["a", "b"]
        assert decision.policy == policy
        assert decision.waited_ms == 0
        plain = json.loads(json.dumps(decision.as_dict()))
        assert plain["candidates"][0]["uncached_tokens"] == decision.prompt_tokens

    @pytest.mark.parametrize("policy", POLICY_NAMES)
    def test_the_only_candidate_is_named_as_such(self, policy: str) -> None:
        assert RoutingPool(policy, "a").decide("r", blocks=PROMPT).reason is Reason.ONLY_CANDIDATE

    @pytest.mark.parametrize("policy", POLICY_NAMES)
    def test_without_a_worker_a_request_is_refused_at_once(self, policy: str) -> None:
        pool = RoutingPool(policy, "a", "b")
        pool.pause("a")
        refusal = pool.refuse("r", excluded=["b"])
        assert (refusal.reason, refusal.retry_after_ms) == (RefusalReason.NO_WORKER, 0.0)
        pool.leave("b")
        assert pool.refuse("r").reason is RefusalReason.NO_WORKER

    @pytest.mark.parametrize("policy", POLICY_NAMES)
    def test_a_full_worker_is_passed_over_and_a_full_pool_refuses(self, policy: str) -> None:
        pool = RoutingPool(policy, "a", "b", limits=AdmissionLimits(max_in_flight_per_worker=2))
        pool.cache.put("a", PROMPT)
        chosen = collections.Counter(pool.decide(f"r{i}", blocks=PROMPT).worker for i in range(4))
        assert chosen == {"a": 2, "b": 2}
        refusal = pool.refuse("r4", blocks=PROMPT)
        assert refusal.reason is RefusalReason.OVERLOADED
        assert refusal.retry_after_ms >= 1000
        pool.end("r0")
        assert pool.decide("r4", blocks=PROMPT)

    @pytest.mark.parametrize("policy", POLICY_NAMES)
    def test_the_same_seed_gives_the_same_choices(self, policy: str) -> None:
        first, second = (spread(RoutingPool(policy, *FOUR, seed=7), 40) for _ in range(2))
        assert first == second

    @pytest.mark.parametrize("policy", POLICY_NAMES)
    def test_what_runs_on_a_worker_that_went_still_ends(self, policy: str) -> None:
        pool = RoutingPool(policy, "a")
        pool.decide("r", blocks=PROMPT)
        pool.leave("a")
        assert pool.policy.in_flight(WorkerId("a")) == 1
        pool.end("r", Outcome.FAILED)
        assert pool.policy.in_flight(WorkerId("a")) == 0


class TestBlindPolicies:
    def test_least_load_takes_the_fewest_in_flight(self) -> None:
        pool = RoutingPool("least_load", *FOUR)
        chosen = [pool.decide(f"r{i}") for i in range(8)]
        assert collections.Counter(d.worker for d in chosen) == dict.fromkeys(FOUR, 2)
        assert chosen[0].reason is Reason.LEAST_LOAD
        pool.end("r5")
        assert pool.decide("next").worker == chosen[5].worker

    def test_least_load_breaks_ties_at_random(self) -> None:
        assert set(spread(RoutingPool("least_load", *FOUR), 60)) == set(FOUR)

    def test_round_robin_takes_each_in_turn(self) -> None:
        pool = RoutingPool("round_robin", *FOUR)
        order = [pool.decide(f"r{i}").worker for i in range(8)]
        assert order == [*FOUR, *FOUR]

    def test_random_takes_each_as_often(self) -> None:
        counts = spread(RoutingPool("random", *FOUR), 400)
        assert all(60 <= counts[w] <= 140 for w in FOUR)


class TestCacheAware:
    def test_a_match_above_the_threshold_decides(self) -> None:
        pool = RoutingPool("cache_aware", *FOUR)
        pool.cache.put("b", PROMPT[:20])
        pool.cache.put("c", PROMPT[:24])
        decision = pool.decide("r", blocks=PROMPT, tokens=32 * BLOCK_TOKENS)
        assert (decision.worker, decision.reason) == ("c", Reason.LONGEST_PREFIX)

    def test_at_the_threshold_the_smallest_cache_decides(self) -> None:
        pool = RoutingPool("cache_aware", "a", "b", "c")
        pool.cache.put("a", PROMPT[:16])
        pool.cache.put("b", prompt_blocks(2, 10))
        pool.cache.put("c", prompt_blocks(3, 5))
        decision = pool.decide("r", blocks=PROMPT, tokens=32 * BLOCK_TOKENS)
        assert (decision.worker, decision.reason) == ("c", Reason.SMALLEST_CACHE)

    def test_the_threshold_can_be_set(self) -> None:
        pool = RoutingPool("cache_aware", "a", "b", parameters={"match_threshold": 0.4})
        pool.cache.put("a", PROMPT[:16])
        decision = pool.decide("r", blocks=PROMPT, tokens=32 * BLOCK_TOKENS)
        assert (decision.worker, decision.reason) == ("a", Reason.LONGEST_PREFIX)

    def test_imbalance_overrules_the_match(self) -> None:
        pool = RoutingPool("cache_aware", "a", "b")
        pool.cache.put("a", PROMPT)
        for number in range(33):
            assert pool.decide(f"r{number}", blocks=PROMPT).worker == "a"
        decision = pool.decide("r33", blocks=PROMPT)
        assert (decision.worker, decision.reason) == ("b", Reason.LEAST_LOAD)

    def test_prompts_on_their_way_count_in_the_size(self) -> None:
        pool = RoutingPool("cache_aware", "a", "b")
        first = pool.decide("r0", blocks=prompt_blocks(5, 10)).worker
        assert pool.decide("r1", blocks=prompt_blocks(6, 10)).worker != first


class TestLbgr:
    def test_it_minimises_prediction_and_price(self) -> None:
        pool = RoutingPool("lbgr", *FOUR)
        pool.cache.put("b", PROMPT[:20])
        decision = pool.decide("r", blocks=PROMPT)
        assert (decision.worker, decision.reason) == ("b", Reason.LOWEST_COST)
        for c in decision.candidates:
            assert c.prediction_ms == pytest.approx(c.service_ms + c.queue_ms + c.residual_ms)
            assert c.cost_ms == pytest.approx(c.prediction_ms + c.price_ms)
            assert c.price_ms > 0
        assert decision.chosen.cost_ms == min(c.cost_ms for c in decision.candidates)
        assert decision.chosen.matched_tokens == 20 * BLOCK_TOKENS

    def test_a_queue_longer_than_a_prefill_outweighs_the_cache(self) -> None:
        pool = RoutingPool("lbgr", "a", "b", parameters=PAPER_FORM)
        pool.cache.put("a", PROMPT)
        chosen = [pool.decide(f"r{i}", blocks=[*PROMPT, i], tokens=4000).worker for i in range(8)]
        assert chosen[0] == "a"
        assert "b" in chosen

    def test_a_price_keeps_work_with_the_cache(self) -> None:
        kept = []
        for price in (0, 4):
            pool = RoutingPool("lbgr", "a", "b", parameters={"price": price, "in_flight_credit": "off"})
            pool.cache.put("a", PROMPT)
            kept.append(sum(pool.decide(f"r{i}", blocks=PROMPT, tokens=3000).worker == "a" for i in range(20)))
        assert kept[0] < kept[1] < 20

    def test_the_price_rises_with_the_backlog(self) -> None:
        pool = RoutingPool("lbgr", "a", "b", parameters={"decode_price": 0})
        prices = [pool.decide(f"r{i}", tokens=4096).chosen.price_ms for i in range(12)]
        assert prices[0] == prices[1]  # one worker is still idle: the floor
        assert prices[-1] > 2 * prices[0]

    def test_no_price_is_the_paper(self) -> None:
        pool = RoutingPool("lbgr", "a", "b", parameters=PAPER_FORM)
        assert all(c.price_ms == 0 for i in range(6) for c in pool.decide(f"r{i}", tokens=4096).candidates)

    def test_running_decodes_make_a_worker_dearer(self) -> None:
        pool = RoutingPool("lbgr", "a", "b", parameters={"residual": "off"})
        first = pool.decide("r0", tokens=4096).worker
        pool.now_ms = 500.0
        pool.first_token("r0")
        prices = {c.worker: c.price_ms for c in pool.decide("r1", tokens=4096).candidates}
        assert prices.pop(first) > prices.popitem()[1]

    def test_ties_are_broken_at_random(self) -> None:
        assert set(spread(RoutingPool("lbgr", *FOUR), 60, tokens=100)) == set(FOUR)

    def test_no_candidate_without_queue_room_is_chosen(self) -> None:
        pool = RoutingPool("lbgr", "a", "b", limits=AdmissionLimits(max_expected_wait_ms=3000))
        actions = [pool.arrive(f"r{i}", tokens=8000) for i in range(20)]
        served = sum(type(a).__name__ == "Dispatch" for a in actions)
        assert 6 <= served <= 10
        refusal = pool.refuse("last", tokens=8000)
        longest = min(pool.belief(w).queue_ms for w in ("a", "b"))
        assert refusal.reason is RefusalReason.OVERLOADED
        assert refusal.retry_after_ms == pytest.approx(max(1000.0, longest - 3000))


class TestExploration:
    def old_and_new(self, **parameters: object) -> RoutingPool:
        """Three workers that hold every prefix and have served, and a new one with an empty cache."""
        pool = RoutingPool("lbgr", "a", "b", "c", parameters=parameters)
        for worker in ("a", "b", "c"):
            pool.cache.put(worker, PROMPT)
        spread(pool, 200, blocks=PROMPT)
        pool.join("new")
        return pool

    def test_a_new_worker_gets_a_bounded_share(self) -> None:
        pool = self.old_and_new(exploration_share=0.1)
        counts = spread(pool, 100, blocks=PROMPT)
        assert 2 <= counts["new"] <= 16
        assert spread(pool, 300, blocks=PROMPT)["new"] <= 16 - counts["new"]

    def test_the_reason_is_named(self) -> None:
        pool = self.old_and_new(exploration_share=0.5)
        reasons = {}
        for number in range(20):
            decision = pool.decide(f"x{number}", blocks=PROMPT)
            reasons[decision.worker] = decision.reason
            pool.end(f"x{number}", Outcome.CANCELLED)
        assert reasons[WorkerId("new")] is Reason.EXPLORATION

    def test_without_exploration_it_starves(self) -> None:
        assert spread(self.old_and_new(exploration_share=0), 100, blocks=PROMPT)["new"] == 0

    def test_nothing_is_tried_that_costs_too_much(self) -> None:
        pool = self.old_and_new(exploration_share=0.5, exploration_extra_ms=10)
        assert spread(pool, 100, blocks=PROMPT)["new"] == 0

    def test_a_new_pool_does_not_explore(self) -> None:
        pool = RoutingPool("lbgr", *FOUR, parameters={"exploration_share": 0.5})
        pool.cache.put("a", PROMPT)
        assert spread(pool, 15, blocks=PROMPT) == {"a": 15}


class TestPaper:
    def test_the_prediction_is_that_of_the_text(self) -> None:
        pool = RoutingPool(
            "lbgr-paper", "a", "b", parameters={"cached_ms_per_token": 0.01, "initial_output_tokens": 10}
        )
        pool.cache.put("a", PROMPT[:20])
        (a, b) = pool.decide("r", blocks=PROMPT, tokens=2049).candidates
        answer_ms = 10 * (21 + 0.05)
        assert a.service_ms == pytest.approx(0.01 * 1280 + 0.112 * 769 + answer_ms)
        assert b.service_ms == pytest.approx(0.112 * 2049 + answer_ms)
        assert (a.price_ms, a.residual_ms, a.queue_ms) == (0, 0, 0)

    def test_the_queue_decays_and_gives_back_what_is_left_on_completion(self) -> None:
        pool = RoutingPool("lbgr-paper", "a")
        first = pool.decide("r", tokens=1000).chosen.service_ms
        pool.now_ms = 20.0
        assert pool.belief("a").queue_ms == pytest.approx(first * 31 / 32)
        second = pool.decide("s", tokens=3000).chosen.service_ms
        pool.now_ms = 60.0
        expected = first * (31 / 32) ** 3 + second * (31 / 32) ** 2
        assert pool.belief("a").queue_ms == pytest.approx(expected)
        pool.end("r")
        assert pool.belief("a").queue_ms == pytest.approx(second * (31 / 32) ** 2)
        pool.end("s", Outcome.FAILED)
        assert pool.belief("a").queue_ms == 0

    def test_one_step_on_the_squared_error_is_taken_per_completion(self) -> None:
        pool = RoutingPool("lbgr-paper", "a", parameters={"learning_rate": 0.5})
        predicted = pool.decide("r", tokens=4096).chosen
        pool.now_ms = predicted.prediction_ms + 100.0
        pool.end("r", output_tokens=64)
        # φ = (1, 0, 1, 0): half of the error is taken, shared by the two.
        assert pool.belief("a").residual_ms == pytest.approx(25.0)
        assert pool.decide("s", tokens=4096).chosen.residual_ms == pytest.approx(50.0)

    def test_what_failed_teaches_nothing(self) -> None:
        pool = RoutingPool("lbgr-paper", "a")
        for number, outcome in enumerate((Outcome.FAILED, Outcome.REJECTED, Outcome.CANCELLED)):
            pool.decide(f"r{number}", tokens=4096)
            pool.now_ms += 9000
            pool.end(f"r{number}", outcome)
        assert pool.belief("a").observations == 0
        assert pool.belief("a").residual_ms == 0
