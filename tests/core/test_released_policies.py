"""The policies of published code, as they are described; each number is worked out by hand or by a slow definition."""

from __future__ import annotations

import itertools
import random

import pytest

from kvrouting_core.routing.decision import Reason
from kvrouting_core.routing.events import Outcome
from kvrouting_core.routing.lbgr_released import Bias, WholeQueue
from kvrouting_core.routing.policy import AdmissionLimits
from kvrouting_core.routing.registry import POLICY_NAMES, build_policy
from kvrouting_core.routing.released import RELEASED_POLICY_NAMES
from kvrouting_core.routing.router_text import (
    MEAN_CHARACTERS,
    SD_CHARACTERS,
    TREE_CHARACTERS,
    RoutedTexts,
    SimulatedText,
)
from tests.fakes.routing_pool import BLOCK_TOKENS, RoutingPool, SetCache, prompt_blocks

# Hashes of real blocks are spread over 64 bits.
_RNG = random.Random(7)
HASHES = [_RNG.getrandbits(64) for _ in range(50_000)]


def hashed(prompt: int, count: int, *, prefix: int | None = None, shared: int = 0) -> list[int]:
    """Blocks of a prompt, the first `shared` of which are those of another."""
    own = [HASHES[prompt * 100 + place] for place in range(count)]
    return own if prefix is None else [*hashed(prefix, shared), *own[shared:]]


class TestNames:
    def test_no_router_offers_them(self) -> None:
        assert not set(RELEASED_POLICY_NAMES) & set(POLICY_NAMES)

    @pytest.mark.parametrize("name", RELEASED_POLICY_NAMES)
    def test_an_unknown_parameter_is_named(self, name: str) -> None:
        with pytest.raises(ValueError, match="no parameter 'decay'"):
            RoutingPool(name, "a", parameters={"decay": 1})

    def test_an_unknown_policy_is_told_the_products_own(self) -> None:
        with pytest.raises(ValueError, match="unknown policy 'lbgr-realeased'; known: lbgr,"):
            build_policy(
                "lbgr-realeased",
                {},
                cache=SetCache(),
                block_size_tokens=BLOCK_TOKENS,
                rng=random.Random(1),
                limits=AdmissionLimits(),
            )


class TestSimulatedText:
    def test_lengths_are_distributed_as_those_of_independent_tokens(self) -> None:
        lengths = SimulatedText(BLOCK_TOKENS).prompt(HASHES, len(HASHES) * BLOCK_TOKENS).lengths
        blocks = [after - before for before, after in itertools.pairwise(lengths)]
        mean = sum(blocks) / len(blocks)
        sd = (sum((b - mean) ** 2 for b in blocks) / len(blocks)) ** 0.5
        assert mean == pytest.approx(MEAN_CHARACTERS * BLOCK_TOKENS, rel=0.005)
        assert sd == pytest.approx(SD_CHARACTERS * BLOCK_TOKENS**0.5, rel=0.02)

    def test_the_same_blocks_have_the_same_text_and_the_rest_the_mean(self) -> None:
        first, second = (SimulatedText(BLOCK_TOKENS).prompt(hashed(1, 4), 4 * BLOCK_TOKENS + tail) for tail in (0, 10))
        assert first.lengths == second.lengths
        assert first.total == first.lengths[-1]
        assert second.total == first.total + round(10 * MEAN_CHARACTERS)

    def test_a_shared_half_of_the_tokens_is_more_than_half_of_the_characters_for_about_half_of_the_prompts(
        self,
    ) -> None:
        text = SimulatedText(BLOCK_TOKENS)
        more = 0
        for prompt in range(400):
            found = text.prompt(hashed(prompt, 8), 8 * BLOCK_TOKENS)
            more += found.lengths[4] > found.total / 2
        assert 150 < more < 250


class TestRoutedTexts:
    def test_it_matches_what_it_was_sent_and_counts_its_characters_once(self) -> None:
        text, tree = SimulatedText(BLOCK_TOKENS), RoutedTexts()
        prompt = text.prompt(hashed(1, 8), 8 * BLOCK_TOKENS)
        sibling = text.prompt(hashed(2, 8, prefix=1, shared=3), 8 * BLOCK_TOKENS)
        tree.insert(prompt, now_ms=0)
        tree.insert(prompt, now_ms=1)
        assert tree.characters == prompt.total
        assert tree.matched_blocks(prompt) == 8
        assert tree.matched_blocks(sibling) == 3
        tree.insert(sibling, now_ms=2)
        assert tree.characters == prompt.total + sibling.total - sibling.lengths[3]

    def test_the_least_recently_used_ends_go_and_only_once_a_minute(self) -> None:
        text, tree = SimulatedText(BLOCK_TOKENS), RoutedTexts()
        blocks_in_tree = int(TREE_CHARACTERS / (MEAN_CHARACTERS * BLOCK_TOKENS))
        old = text.prompt(range(1, 101), 100 * BLOCK_TOKENS)
        tree.insert(old, now_ms=0)
        many = text.prompt(range(1000, 1000 + blocks_in_tree), blocks_in_tree * BLOCK_TOKENS)
        tree.insert(many, now_ms=59_000)
        assert tree.characters > TREE_CHARACTERS
        tree.insert(text.prompt([5], BLOCK_TOKENS), now_ms=60_000)
        assert tree.characters <= TREE_CHARACTERS + 1000
        assert tree.matched_blocks(old) < 100, "its end went"
        assert tree.matched_blocks(many) == blocks_in_tree, "it was used later"


class TestReleasedLbgr:
    def test_the_queue_decays_in_whole_milliseconds_at_each_tick(self) -> None:
        queue, expected = WholeQueue(), 1000
        queue.add(1000, now_ms=5)
        for tick in range(1, 60):
            expected = int(expected * 31 / 32)
            assert queue.at(tick * 20.0) == expected
        queue.take_off(1000, elapsed_ms=59 * 20.0, now_ms=59 * 20.0)
        assert queue.at(59 * 20.0) == 0, "what rounding took is not given back"

    def test_the_bias_is_least_squares_with_forgetting_and_never_below_one(self) -> None:
        bias = Bias()
        for missed in (-500.0, 300.0, 40.0):
            bias.learn(missed)
        targets, forgetting = (1.0, 300.0, 40.0), 0.992
        weights = [forgetting ** (2 - place) for place in range(3)]
        wanted = sum(w * t for w, t in zip(weights, targets, strict=True)) / sum(weights)
        assert bias.value == pytest.approx(wanted, rel=1e-4)

    def test_the_first_worker_wins_unless_a_later_one_is_clearly_better(self) -> None:
        pool = RoutingPool("lbgr-released", "a", "b")
        prompt = hashed(1, 8)
        first = pool.decide("r1", blocks=prompt)
        assert first.worker == "a"
        assert first.chosen.service_ms == SimulatedText(BLOCK_TOKENS).prompt(prompt, first.prompt_tokens).total
        assert pool.decide("r2", blocks=hashed(2, 8)).worker == "b"

    def test_a_prompt_counts_as_cached_from_its_dispatch_on_and_no_eviction_is_heard(self) -> None:
        pool = RoutingPool("lbgr-released", "a", "b")
        prompt = hashed(1, 32)
        pool.decide("r1", blocks=prompt)
        again = pool.decide("r2", blocks=prompt)
        terms = {str(c.worker): c for c in again.candidates}
        assert terms["a"].service_ms < terms["b"].service_ms
        assert not pool.cache.held

    def test_a_completed_request_teaches_and_a_failed_one_does_not(self) -> None:
        pool = RoutingPool("lbgr-released", "a")
        pool.decide("r1", blocks=hashed(1, 1))
        pool.now_ms = 100_000
        pool.end("r1", Outcome.FAILED)
        assert pool.belief("a").observations == 0
        pool.decide("r2", blocks=hashed(2, 1))
        pool.now_ms = 200_000
        pool.end("r2")
        assert pool.belief("a").observations == 1
        assert pool.belief("a").residual_ms > 90_000


class TestReleasedCacheAware:
    def test_a_long_match_decides_and_a_short_one_does_not(self) -> None:
        pool = RoutingPool("cache_aware-released", "a", "b")
        holder = pool.decide("r1", blocks=hashed(1, 10)).worker
        long_match = pool.decide("r2", blocks=hashed(2, 10, prefix=1, shared=8))
        assert (long_match.worker, long_match.reason) == (holder, Reason.LONGEST_PREFIX)
        short = pool.decide("r3", blocks=hashed(3, 10, prefix=1, shared=2))
        assert short.reason is Reason.SMALLEST_CACHE
        assert short.worker != holder

    def test_load_decides_when_it_differs_too_much(self) -> None:
        pool = RoutingPool("cache_aware-released", "a", "b")
        prompt = hashed(1, 10)
        reasons = [pool.decide(f"r{number}", blocks=prompt).reason for number in range(36)]
        assert reasons[1:33] == [Reason.LONGEST_PREFIX] * 32
        assert reasons[33] is Reason.LEAST_LOAD

    def test_the_index_is_not_asked(self) -> None:
        pool = RoutingPool("cache_aware-released", "a", "b")
        pool.cache.put("b", prompt_blocks(1, 10))
        assert pool.decide("r", blocks=prompt_blocks(1, 10)).reason is Reason.SMALLEST_CACHE
