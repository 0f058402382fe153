"""Late binding: what waits, in which order it goes, and that nothing is lost."""

from __future__ import annotations

import pytest

from kvrouting_core.routing.decision import Dispatch
from kvrouting_core.routing.events import (
    Arrival,
    RoutingRequest,
    SchedulerOptions,
    Tick,
)
from kvrouting_core.routing.policy import AdmissionLimits
from tests.core.late_bench import MS_PER_TOKEN, WORKERS, Bench, report
from tests.fakes.routing_pool import prompt_blocks


class TestRoom:
    def test_what_a_worker_has_ahead_is_bounded(self) -> None:
        bench = Bench()
        for number in range(6):
            bench.arrive(f"r{number}", 500)  # 56 ms each: two are more than 100 ms
        assert bench.order == ["r0", "r1"]
        assert bench.policy.waiting == 4
        bench.first_token("r0")
        assert bench.order == ["r0", "r1", "r2"]

    def test_more_ahead_is_sent_if_it_is_so_set(self) -> None:
        bench = Bench(parameters={"release_ahead_ms": 250})
        for number in range(6):
            bench.arrive(f"r{number}", 500)
        assert len(bench.sent) == 5

    def test_an_idle_worker_takes_a_prompt_of_any_length(self) -> None:
        bench = Bench()
        assert isinstance(bench.arrive("long", 100_000)[0], Dispatch)

    def test_decodes_bound_what_is_in_flight(self) -> None:
        """One answer token is expected, a step takes 21 ms and a mean prefill 112 ms and more: c is 1."""
        tight = {"decode_limit": 1.0, "initial_output_tokens": 1.0}
        bench = Bench(parameters=tight)
        bench.arrive("r0", 1000)
        bench.first_token("r0")
        bench.arrive("r1", 1000)
        assert bench.order == ["r0"]
        bench.end("r0")
        assert bench.order == ["r0", "r1"]
        unbound = Bench(parameters={**tight, "decode_limit": 0})
        unbound.arrive("r0", 1000)
        unbound.first_token("r0")
        unbound.arrive("r1", 1000)
        assert unbound.order == ["r0", "r1"]

    def test_requests_of_others_take_room(self) -> None:
        bench = Bench(parameters={"decode_limit": 1.0, "initial_output_tokens": 20.0})
        report(bench, running=50)
        bench.arrive("r0", 1000)
        bench.first_token("r0")
        bench.arrive("r1", 1000)
        assert bench.order == ["r0"]
        report(bench, running=1)
        assert bench.order == ["r0", "r1"]

    @pytest.mark.parametrize(
        ("interval", "follow", "sent"), [(0, "on", 1), (1, "on", 1), (2, "on", 2), (8, "on", 5), (8, "off", 1)]
    )
    def test_an_engine_that_decodes_between_prefills_gets_more_ahead(
        self, interval: int, follow: str, sent: int
    ) -> None:
        """A step takes 21 ms, the prefill of 2400 tokens 281 ms, that of 8192 tokens 1065 ms."""
        scheduler = SchedulerOptions(prefill_decode_interval=interval)
        bench = Bench(parameters={"follow_scheduler": follow == "on"}, scheduler=scheduler)
        for number in range(8):
            bench.arrive(f"r{number}", 2400)
        assert len(bench.sent) == sent

    def test_the_limit_of_the_pool_holds(self) -> None:
        bench = Bench(limits=AdmissionLimits(max_in_flight_per_worker=1))
        bench.arrive("r0", 10)
        bench.arrive("r1", 10)
        assert bench.order == ["r0"]


class TestRoomByTime:
    """Answers that are not streamed: no first token tells that their prefill is over."""

    def test_time_alone_makes_room(self) -> None:
        bench = Bench()
        bench.arrive("r0", 2000)
        bench.now_ms = 50.0
        bench.arrive("r1", 2000)
        bench.tell(Tick())
        assert bench.order == ["r0"]
        bench.now_ms = 2000 * MS_PER_TOKEN * 1.2
        bench.tell(Tick())
        assert bench.order == ["r0", "r1"]

    def test_a_prompt_of_several_chunks_does_not_close_its_worker_for_its_whole_answer(self) -> None:
        bench = Bench()
        bench.arrive("long", 20_000)
        bench.arrive("next", 500)
        took_ms = 20_000 * MS_PER_TOKEN * 1.3
        while bench.now_ms < took_ms:
            assert bench.order == ["long"]
            report(bench, running=1)
        for _ in range(6):
            report(bench, running=1)
        assert bench.order == ["long", "next"]

    def test_it_is_not_taken_for_prefilled_while_it_may_wait(self) -> None:
        bench = Bench()
        bench.arrive("long", 20_000)
        bench.arrive("next", 500)
        for _ in range(20):
            report(bench, running=1, waiting_tokens=500_000)  # a minute of others' work before it
        assert bench.order == ["long"]


class TestOrder:
    def test_short_work_goes_first(self) -> None:
        bench = Bench()
        bench.arrive("running", 2000)
        bench.arrive("long", 8000)
        bench.now_ms = 100.0
        bench.arrive("short", 200)
        bench.end("running")
        assert bench.order == ["running", "short", "long"]

    def test_but_not_before_what_has_waited_for_long(self) -> None:
        bench = Bench()
        bench.arrive("running", 2000)
        bench.arrive("long", 8000)
        bench.now_ms = 2 * MS_PER_TOKEN * 8000 * 1.3
        bench.arrive("short", 200)
        bench.end("running")
        assert bench.order == ["running", "long"]

    def test_without_precedence_the_first_is_served_first(self) -> None:
        bench = Bench(parameters={"size_precedence": 0})
        bench.arrive("running", 2000)
        bench.arrive("long", 8000)
        bench.arrive("short", 200)
        bench.end("running")
        assert bench.order == ["running", "long"]

    def test_a_retry_keeps_the_place_of_its_first_attempt(self) -> None:
        bench = Bench(WORKERS[:2])
        bench.now_ms = 5000.0
        bench.arrive("a", 2000)
        bench.arrive("b", 2000)
        bench.arrive("new", 2000)
        old = RoutingRequest(request_id="old", blocks=(), prompt_tokens=2000)
        bench.tell(Arrival(request=old, arrived_ms=1000.0))
        assert bench.policy.waiting == 2
        bench.end("a")
        assert bench.order[-1] == "old"

    def test_a_request_waits_for_the_worker_that_has_its_prefix(self) -> None:
        """The other one is idle, but copying 6000 tokens there costs more than the wait."""
        bench = Bench(WORKERS[:2])
        blocks = prompt_blocks(1, 100)
        bench.cache.put(WORKERS[0], blocks)
        bench.arrive("warm", 1800, blocks=blocks[:1])
        assert bench.sent == [("warm", WORKERS[0])]
        bench.arrive("kin", blocks=blocks)
        assert bench.policy.waiting == 1
        bench.end("warm")
        assert bench.sent[-1] == ("kin", WORKERS[0])

    def test_siblings_follow_the_one_that_went_ahead(self) -> None:
        """Two workers are idle, but the third is about to have what the siblings share."""
        bench = Bench(WORKERS)
        shared = prompt_blocks(1, 60)
        for number in range(3):
            bench.arrive(f"kin{number}", blocks=prompt_blocks(10 + number, 61, prefix=shared))
        assert bench.order == ["kin0"]
        bench.first_token("kin0")
        assert bench.order == ["kin0", "kin1", "kin2"]
        assert len({worker for _, worker in bench.sent}) == 1

    def test_without_credit_they_spread(self) -> None:
        bench = Bench(WORKERS, parameters={"in_flight_credit": False})
        shared = prompt_blocks(1, 60)
        for number in range(3):
            bench.arrive(f"kin{number}", blocks=prompt_blocks(10 + number, 61, prefix=shared))
        assert {worker for _, worker in bench.sent} == set(WORKERS)


class TestTies:
    def test_nobody_waits_for_a_worker_beside_one_that_has_room_and_costs_the_same(self) -> None:
        equal = {"decode_price": 0.0, "decode_share": 0.0}
        for seed in range(8):
            bench = Bench(WORKERS[:2], parameters=equal, limits=AdmissionLimits(max_in_flight_per_worker=1), seed=seed)
            for name in ("r0", "r1"):
                bench.arrive(name)
                bench.first_token(name)
            assert {worker for _, worker in bench.sent} == set(WORKERS[:2])
