"""Service time, speed, answer length and queue: what is believed, and what changes it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouting_core.routing.engine_reports import RecentPeak
from kvrouting_core.routing.events import Outcome, SchedulerOptions
from kvrouting_core.routing.queue_load import DecayedQueue, DrainedQueue, Work, surely_prefilled
from kvrouting_core.routing.running_mean import RunningMean
from tests.fakes.routing_pool import BLOCK_TOKENS, RoutingPool, prompt_blocks

A, B = 0.112, 4.4e-6  # of the L40
PROMPT = prompt_blocks(1, 32)
PLAIN = {"residual": "off", "price": 0, "decode_price": 0}


def work(name: str, tokens: int, *, at_ms: float = 0.0, prefill_ms: float | None = None) -> Work:
    return Work(
        request_id=name,
        dispatched_ms=at_ms,
        uncached_tokens=tokens,
        prefill_ms=float(tokens) if prefill_ms is None else prefill_ms,
        service_ms=float(tokens),
        context_tokens=tokens,
        sequences=1,
    )


class TestServiceTime:
    def test_prefill_of_the_uncached_part_and_decode_of_the_answer(self) -> None:
        pool = RoutingPool("lbgr", "a", parameters=PLAIN)
        pool.cache.put("a", PROMPT[:16])
        chosen = pool.decide("r", blocks=PROMPT, tokens=2000, max_output_tokens=5).chosen
        h, u = 16 * BLOCK_TOKENS, 2000 - 16 * BLOCK_TOKENS
        assert (chosen.matched_tokens, chosen.uncached_tokens) == (h, u)
        assert chosen.service_ms == pytest.approx(A * u + B * u * (h + u / 2) + 4 * (21 + 0.05))

    def test_an_engine_computes_at_least_one_token(self) -> None:
        pool = RoutingPool("lbgr", "a")
        pool.cache.put("a", PROMPT)
        assert pool.decide("r", blocks=PROMPT, tokens=32 * BLOCK_TOKENS).chosen.uncached_tokens == 1

    def test_further_prompts_are_weighed_and_never_matched(self) -> None:
        pool = RoutingPool("lbgr", "a", parameters=PLAIN)
        pool.cache.put("a", PROMPT)
        one = pool.decide("r", tokens=1000).chosen
        pool.end("r", Outcome.CANCELLED)
        three = pool.decide("s", tokens=1000, further_tokens=2000, sequences=3).chosen
        decode_ms = 63 * 21.05
        assert three.uncached_tokens == 3000
        assert three.service_ms - decode_ms == pytest.approx(3 * (one.service_ms - decode_ms))

    def test_several_answers_load_the_decode_batch(self) -> None:
        steps = []
        for sequences in (1, 8):
            pool = RoutingPool("lbgr", "a", parameters=PLAIN)
            pool.decide("r", tokens=1000, sequences=sequences)
            pool.first_token("r")
            steps.append(pool.decide("s", tokens=1000).chosen.service_ms)
        assert steps[1] - steps[0] == pytest.approx(63 * 7 * (0.05 + 1.9e-4 * 1000))

    def test_the_coefficients_belong_to_the_worker(self) -> None:
        pool = RoutingPool("lbgr", "slow", parameters=PLAIN)
        pool.join("fast", worker_class="H200")
        pool.join("other", worker_class="a card nobody knows")
        service = {c.worker: c.service_ms for c in pool.decide("r", tokens=4096).candidates}
        assert service["fast"] < service["slow"] / 3  # type: ignore[index]
        assert service["other"] == service["slow"]  # type: ignore[index]

    def test_a_full_decode_batch_makes_a_request_wait_for_a_slot(self) -> None:
        pool = RoutingPool("lbgr", parameters=PLAIN)
        pool.join("a", scheduler=SchedulerOptions(max_running_requests=2))
        for name in ("r", "s"):
            assert pool.decide(name, tokens=100, max_output_tokens=101).chosen.queue_ms < 20
            pool.first_token(name)
        chosen = pool.decide("t", tokens=100, max_output_tokens=101).chosen
        assert chosen.queue_ms == pytest.approx(63 * 21.19 / 2, rel=0.001)
        pool.end("t", Outcome.CANCELLED)
        pool.end("r", Outcome.CANCELLED)
        assert pool.decide("t", tokens=100, max_output_tokens=101).chosen.queue_ms < 20


class TestAnswerLength:
    def service_ms(self, pool: RoutingPool, limit: int | None = None) -> float:
        service_ms = pool.decide("probe", tokens=1, max_output_tokens=limit).chosen.service_ms
        pool.end("probe", Outcome.CANCELLED)
        return service_ms

    def test_the_mean_follows_what_completes(self) -> None:
        pool = RoutingPool("lbgr", "a", parameters=PLAIN)
        before = self.service_ms(pool)
        for number in range(40):
            pool.decide(f"r{number}", tokens=1, sequences=2)
            pool.end(f"r{number}", output_tokens=2 * 11)
        after = self.service_ms(pool)
        assert before - after == pytest.approx((64 - 11) * 21.05, rel=0.1)

    def test_the_clients_own_limit_caps_it(self) -> None:
        pool = RoutingPool("lbgr", "a", parameters=PLAIN)
        assert self.service_ms(pool, 3) == pytest.approx(A + 2 * 21.05, rel=0.001)
        assert self.service_ms(pool, 0) == pytest.approx(A, rel=0.001)

    def test_only_completed_requests_count(self) -> None:
        pool = RoutingPool("lbgr", "a", parameters=PLAIN)
        before = self.service_ms(pool)
        for number, outcome in enumerate((Outcome.FAILED, Outcome.REJECTED, Outcome.CANCELLED)):
            pool.decide(f"r{number}", tokens=1)
            pool.end(f"r{number}", outcome, output_tokens=5000)
        assert self.service_ms(pool) == before

    def test_the_gain_falls_to_a_fiftieth(self) -> None:
        mean = RunningMean(64.0)
        mean.learn(0.0)
        assert mean.value == pytest.approx(64 * 3 / 4)
        for _ in range(200):
            mean.learn(100.0)
        before = mean.value
        mean.learn(0.0)
        assert mean.value == pytest.approx(before * 0.98)


class Engine:
    """The two counters of one engine, as its reports tell them."""

    def __init__(self, pool: RoutingPool, worker: str, *, slowness: float, seconds_per_report: float = 1.0) -> None:
        self.pool, self.worker, self.slowness = pool, worker, slowness
        self.busy_ms = 0.0
        self.tokens = 0

    def serve(self, tokens: int) -> None:
        self.tokens += tokens
        self.busy_ms += self.slowness * A * tokens
        self.pool.report(self.worker, busy_ms=self.busy_ms, tokens=self.tokens)


def learn_speeds(pool: RoutingPool, engines: list[Engine], seconds: int, tokens: int = 4000) -> None:
    for _ in range(seconds):
        pool.now_ms += 1000.0
        for engine in engines:
            engine.serve(tokens)


class TestSpeed:
    def test_a_worker_that_is_three_times_slower_is_found_out(self) -> None:
        pool = RoutingPool("lbgr", "a", "b", "c", "slow")
        engines = [Engine(pool, w, slowness=1.0) for w in "abc"]
        learn_speeds(pool, [*engines, Engine(pool, "slow", slowness=3.0)], 30)
        assert pool.belief("slow").speed_factor == pytest.approx(3.0, rel=0.05)
        assert pool.belief("slow").prefill_ms_per_token == pytest.approx(3 * A, rel=0.05)
        assert [pool.belief(w).speed_factor for w in "abc"] == pytest.approx([1.0] * 3, rel=0.02)

    def test_small_differences_are_noise(self) -> None:
        pool = RoutingPool("lbgr", *"abcd")
        learn_speeds(pool, [Engine(pool, w, slowness=s) for w, s in zip("abcd", (1, 1.1, 1.2, 0.9), strict=True)], 30)
        assert [pool.belief(w).speed_factor for w in "abcd"] == pytest.approx([1.05] * 4, rel=0.02)

    def test_a_prior_that_is_off_is_corrected_for_all(self) -> None:
        pool = RoutingPool("lbgr", "a", "b")
        learn_speeds(pool, [Engine(pool, w, slowness=2.0) for w in "ab"], 30)
        assert pool.belief("a").speed_factor == pytest.approx(2.0, rel=0.05)
        pool.join("new")
        assert pool.belief("new").speed_factor == pool.belief("a").speed_factor

    def test_idle_time_forgets_nothing(self) -> None:
        pool = RoutingPool("lbgr", "a", "b", "c")
        engines = [Engine(pool, "a", slowness=3.0), Engine(pool, "b", slowness=1.0), Engine(pool, "c", slowness=1.0)]
        learn_speeds(pool, engines, 30)
        learn_speeds(pool, engines, 600, tokens=0)
        learn_speeds(pool, engines, 1, tokens=600)
        assert pool.belief("a").speed_factor == pytest.approx(3.0, rel=0.05)

    def test_a_recovered_worker_is_found_out_too(self) -> None:
        pool = RoutingPool("lbgr", "a", "b", "c")
        engines = [Engine(pool, "a", slowness=3.0), Engine(pool, "b", slowness=1.0), Engine(pool, "c", slowness=1.0)]
        learn_speeds(pool, engines, 20)
        engines[0].slowness = 1.0
        learn_speeds(pool, engines, 30)
        assert pool.belief("a").speed_factor == pytest.approx(1.0, rel=0.05)

    @pytest.mark.parametrize("told", [True, False])
    def test_counters_that_go_back_are_a_restart(self, told: bool) -> None:
        pool = RoutingPool("lbgr", "a", "b", "c")
        others = [Engine(pool, w, slowness=1.0) for w in "bc"]
        learn_speeds(pool, [Engine(pool, "a", slowness=3.0), *others], 20)
        if told:
            pool.join("a", restarted=True)
        learn_speeds(pool, [Engine(pool, "a", slowness=1.0), *others], 1)
        assert pool.belief("a").speed_factor == pytest.approx(1.0, rel=0.05)
        learn_speeds(pool, [Engine(pool, "a", slowness=1.0), *others], 5)
        assert pool.belief("a").speed_factor == pytest.approx(1.0, rel=0.05)

    def test_a_report_that_comes_late_says_nothing(self) -> None:
        pool = RoutingPool("lbgr", "a", "b", "c")
        learn_speeds(pool, [Engine(pool, w, slowness=2.0) for w in "abc"], 20)
        before = pool.belief("a")
        pool.report("a", busy_ms=1.0, tokens=1, waiting_tokens=9000, waiting=4, reported_ms=5000.0)
        assert pool.belief("a") == before

    def test_it_can_be_turned_off(self) -> None:
        pool = RoutingPool("lbgr", "a", "b", parameters={"learned_speed": "off"})
        learn_speeds(pool, [Engine(pool, w, slowness=2.0) for w in "ab"], 10)
        assert pool.belief("a").speed_factor == 1.0


class TestDrainedQueue:
    def test_it_is_the_work_without_a_first_token(self) -> None:
        queue = DrainedQueue(chunk_tokens=8192)
        for name, tokens in (("a", 300), ("b", 500)):
            queue.add(work(name, tokens))
        assert queue.load_ms(0.0, 1.0) == 800
        assert queue.load_ms(0.0, 2.0) == 1600
        queue.prefilled("a", now_ms=300.0)
        assert queue.load_ms(300.0, 1.0) == 500
        queue.remove("b", now_ms=400.0)
        assert queue.load_ms(400.0, 1.0) == 0

    def test_time_drains_the_oldest_chunk_and_no_more(self) -> None:
        queue = DrainedQueue(chunk_tokens=400)
        for name in ("a", "b"):
            queue.add(work(name, 300))
        assert queue.load_ms(100.0, 1.0) == 500
        assert queue.load_ms(9999.0, 1.0) == 200  # the second chunk cannot have begun before a first token

    def test_an_idle_worker_starts_with_the_dispatch(self) -> None:
        queue = DrainedQueue(chunk_tokens=8192)
        queue.add(work("a", 300, at_ms=5000.0))
        assert queue.load_ms(5000.0, 1.0) == 300
        assert queue.load_ms(5100.0, 1.0) == 200

    def test_an_ended_request_may_be_ended_again(self) -> None:
        queue = DrainedQueue(chunk_tokens=8192)
        queue.add(work("a", 300))
        queue.remove("a", now_ms=1.0)
        queue.prefilled("a", now_ms=2.0)
        queue.remove("a", now_ms=3.0)
        assert queue.load_ms(4.0, 1.0) == 0


class TestDecayedQueue:
    @given(
        st.lists(st.tuples(st.floats(0, 1000), st.integers(1, 5000), st.floats(0, 2000)), min_size=1, max_size=8),
        st.floats(0, 4000),
    )
    def test_it_is_the_sum_of_what_is_left_of_each(
        self, requests: list[tuple[float, int, float]], now_ms: float
    ) -> None:
        queue = DecayedQueue(factor=31 / 32, interval_ms=20.0)
        steps = [(at, 0, n) for n, (at, _, _) in enumerate(requests)]
        steps += [(at + lasted, 1, n) for n, (at, _, lasted) in enumerate(requests)]
        expected = 0.0
        for at_ms, kind, number in sorted(s for s in steps if s[0] <= now_ms):
            started, tokens, lasted = requests[number]
            if kind == 0:
                queue.add(work(str(number), tokens, at_ms=at_ms))
                if started + lasted > now_ms:
                    expected += tokens * (31 / 32) ** ((now_ms - started) / 20)
            else:
                queue.remove(str(number), now_ms=at_ms)
        assert queue.load_ms(now_ms, 1.0) == pytest.approx(expected, rel=1e-6, abs=1e-6)


class TestEngineReports:
    def test_others_work_counts(self) -> None:
        pool = RoutingPool("lbgr", "a", parameters=PLAIN)
        pool.report("a", waiting=4, waiting_tokens=5000)
        assert pool.belief("a").queue_ms == pytest.approx(5000 * A)
        pool.now_ms = 100.0
        assert pool.belief("a").queue_ms == pytest.approx(5000 * A - 100)

    def test_own_work_is_not_counted_twice(self) -> None:
        pool = RoutingPool("lbgr", "a", parameters=PLAIN)
        pool.decide("r", tokens=5000)
        own = pool.belief("a").queue_ms
        pool.report("a", waiting=1, waiting_tokens=5000)
        assert pool.belief("a").queue_ms == own

    def test_what_ended_since_the_report_was_ours(self) -> None:
        pool = RoutingPool("lbgr", "a", parameters=PLAIN)
        pool.decide("r", tokens=5000)
        pool.now_ms = 50.0
        pool.first_token("r")
        pool.end("r")
        pool.now_ms = 60.0
        pool.report("a", waiting=1, waiting_tokens=5000, reported_ms=40.0)
        assert pool.belief("a").queue_ms == 0

    def test_an_old_report_loses_its_force(self) -> None:
        pool = RoutingPool("lbgr", "a", parameters=PLAIN)
        pool.report("a", waiting=900, waiting_tokens=900_000)
        pool.now_ms = 9999.0
        assert pool.belief("a").queue_ms > 0
        pool.now_ms = 10_000.0
        assert pool.belief("a").queue_ms == 0

    def test_the_paper_form_of_the_queue_hears_no_engine(self) -> None:
        pool = RoutingPool("lbgr", "a", parameters={"queue": "decayed"})
        pool.report("a", waiting=4, waiting_tokens=5000)
        assert pool.belief("a").queue_ms == 0

    def test_requests_that_are_not_streamed_leave_the_queue_by_the_engines_word(self) -> None:
        pool = RoutingPool("lbgr", "a", parameters=PLAIN)
        for number in range(10):
            pool.decide(f"r{number}", tokens=6000)
        pool.now_ms = 5000.0
        assert pool.belief("a").queue_ms > 50_000 * A  # nothing but the oldest chunk drains without a first token
        pool.report("a", running=10, busy_ms=1.0, tokens=60_000)
        assert pool.belief("a").queue_ms <= 8192 * A * 2
        for number in range(10):
            pool.end(f"r{number}", output_tokens=4)
        assert pool.belief("a").queue_ms == 0

    @given(
        tokens=st.lists(st.integers(1, 9000), max_size=8),
        waiting=st.integers(0, 20_000),
        chunk=st.integers(1, 9000),
    )
    def test_what_is_surely_prefilled_leaves_room_for_what_waits(
        self, tokens: list[int], waiting: int, chunk: int
    ) -> None:
        queued = [work(str(n), t, at_ms=float(n)) for n, t in enumerate(tokens)]
        done = surely_prefilled(queued, sent_before_ms=math.inf, waiting_uncached_tokens=waiting, chunk_tokens=chunk)
        assert done == queued[: len(done)]
        left = sum(w.uncached_tokens for w in queued[len(done) :])
        assert left >= waiting + chunk or not done
        if done:
            assert left - queued[len(done)].uncached_tokens <= waiting + chunk

    def test_what_was_just_sent_may_not_have_arrived(self) -> None:
        queued = [work("a", 100, at_ms=10.0), work("b", 9000, at_ms=20.0)]
        assert surely_prefilled(queued, sent_before_ms=15.0, waiting_uncached_tokens=0, chunk_tokens=1) == []


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 6)), max_size=12), st.data())
def test_recent_peak_is_the_largest_value_since(steps: list[tuple[int, int]], data: st.DataObject) -> None:
    peak, history, now = RecentPeak(), [(-math.inf, 0)], 0
    for passed, value in steps:
        now += passed
        peak.record(value, now_ms=float(now))
        history.append((now, value))
    asked = sorted(data.draw(st.lists(st.integers(0, now), max_size=3)))
    for since in asked:
        in_force = max((at, n) for n, (at, _) in enumerate(history) if at <= since)[1]
        assert peak.since(float(since)) == max(value for _, value in history[in_force:])
