"""Late binding: what waits, in which order it goes, and that nothing is lost."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import HealthCheck, settings

from kvrouting_core.identity import WorkerId
from kvrouting_core.routing.decision import Action, Dispatch, Refusal, RefusalReason
from kvrouting_core.routing.events import (
    Arrival,
    Ended,
    Event,
    FirstToken,
    LoadReport,
    Outcome,
    RoutingRequest,
    SchedulerOptions,
    Tick,
    WorkerGone,
    WorkerJoined,
    WorkerPaused,
)
from kvrouting_core.routing.late import LatePolicy
from kvrouting_core.routing.parameters import LbgrParameters
from kvrouting_core.routing.policy import AdmissionLimits
from tests.fakes.routing_pool import BLOCK_TOKENS, SetCache, profile, prompt_blocks

WORKERS = tuple(WorkerId(f"w{i}") for i in range(3))
ALONE = WORKERS[:1]
SETTINGS = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
MS_PER_TOKEN = 0.112  # of the L40's prior


class Bench:
    """A late-binding policy with workers, and what it has sent and refused."""

    def __init__(
        self,
        workers: Sequence[WorkerId] = ALONE,
        *,
        parameters: Mapping[str, object] | None = None,
        limits: AdmissionLimits | None = None,
        scheduler: SchedulerOptions | None = None,
        seed: int = 1,
    ) -> None:
        self.cache = SetCache()
        self.now_ms = 0.0
        self.sent: list[tuple[str, WorkerId]] = []
        self.refused: list[Refusal] = []
        self.policy = LatePolicy(
            "lbgr",
            LbgrParameters(binding="late", exploration_share=0, **(parameters or {})),  # type: ignore[arg-type]
            cache=self.cache,
            block_size_tokens=BLOCK_TOKENS,
            rng=random.Random(seed),
            limits=limits or AdmissionLimits(),
        )
        for worker in workers:
            self.tell(WorkerJoined(profile=profile(worker, scheduler=scheduler)))

    def tell(self, event: Event) -> Sequence[Action]:
        actions = self.policy.handle(event, now_ms=self.now_ms)
        for action in actions:
            if isinstance(action, Dispatch):
                self.sent.append((action.request_id, action.worker))
            else:
                self.refused.append(action)
        return actions

    def arrive(
        self, name: str, tokens: int = 2000, *, blocks: Sequence[int] = (), excluded: Sequence[WorkerId] = ()
    ) -> Sequence[Action]:
        prompt = max(tokens, len(blocks) * BLOCK_TOKENS + 1)
        request = RoutingRequest(request_id=name, blocks=blocks, prompt_tokens=prompt, excluded=frozenset(excluded))
        return self.tell(Arrival(request=request))

    def first_token(self, name: str) -> None:
        self.tell(FirstToken(request_id=name))

    def end(self, name: str, outcome: Outcome = Outcome.COMPLETED) -> None:
        self.tell(Ended(request_id=name, outcome=outcome, output_tokens=4))

    @property
    def order(self) -> list[str]:
        return [name for name, _ in self.sent]


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


def report(bench: Bench, *, running: int, worker: WorkerId = ALONE[0], waiting_tokens: int = 0) -> None:
    bench.now_ms += 1000
    bench.tell(
        LoadReport(
            worker=worker,
            reported_ms=bench.now_ms,
            running_requests=running,
            waiting_requests=0,
            used_tokens=0,
            waiting_uncached_tokens=waiting_tokens,
            total_prefill_uncached_tokens=0,
            total_prefill_busy_us=0,
        )
    )


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


class TestWhoDoesNotWait:
    def test_without_a_worker_a_request_is_refused(self) -> None:
        bench = Bench(())
        bench.arrive("r0")
        assert [r.reason for r in bench.refused] == [RefusalReason.NO_WORKER]

    def test_beyond_the_limit_of_the_line_a_request_is_refused(self) -> None:
        bench = Bench(limits=AdmissionLimits(max_waiting=1))
        for number in range(3):
            bench.arrive(f"r{number}")
        assert bench.order == ["r0"]
        assert [(r.request_id, r.reason) for r in bench.refused] == [("r2", RefusalReason.OVERLOADED)]
        assert bench.refused[0].retry_after_ms >= 1000
        assert bench.policy.waiting == 1
        bench.end("r0")
        bench.end("r1")
        assert isinstance(bench.arrive("r2")[0], Dispatch)  # a refused id is forgotten

    def test_a_request_that_can_go_at_once_is_not_held_against_the_limit(self) -> None:
        bench = Bench(limits=AdmissionLimits(max_waiting=0))
        assert isinstance(bench.arrive("r0")[0], Dispatch)
        assert isinstance(bench.arrive("r1")[0], Refusal)

    def test_a_wait_that_would_be_too_long_is_refused(self) -> None:
        bench = Bench(limits=AdmissionLimits(max_expected_wait_ms=1000))
        for number in range(8):
            bench.arrive(f"r{number}", 2000)  # 233 ms each
        assert bench.policy.waiting == 5
        assert {r.reason for r in bench.refused} == {RefusalReason.OVERLOADED}

    def test_a_client_that_leaves_while_it_waits_is_forgotten(self) -> None:
        bench = Bench()
        for name in ("r0", "r1", "r2"):
            bench.arrive(name)
        bench.end("r1", Outcome.CANCELLED)
        bench.first_token("r0")
        assert bench.order == ["r0", "r2"]
        assert bench.policy.waiting == 0

    def test_when_the_last_worker_is_gone_those_who_wait_are_refused(self) -> None:
        bench = Bench()
        for name in ("r0", "r1"):
            bench.arrive(name)
        bench.tell(WorkerGone(worker=ALONE[0], reason="test"))
        assert [(r.request_id, r.reason) for r in bench.refused] == [("r1", RefusalReason.NO_WORKER)]
        assert (bench.policy.waiting, bench.policy.in_flight(ALONE[0])) == (0, 1)

    def test_while_a_worker_is_only_paused_they_wait(self) -> None:
        bench = Bench()
        for name in ("r0", "r1"):
            bench.arrive(name)
        bench.tell(WorkerPaused(worker=ALONE[0], reason="test"))
        bench.end("r0")
        assert bench.policy.waiting == 1
        bench.tell(WorkerJoined(profile=profile(ALONE[0])))
        assert bench.order == ["r0", "r1"]

    def test_those_planned_for_a_worker_that_goes_are_planned_anew(self) -> None:
        bench = Bench(WORKERS[:2])
        blocks = prompt_blocks(1, 100)
        bench.cache.put(WORKERS[0], blocks)
        bench.arrive("warm", 1800, blocks=blocks[:1])
        bench.arrive("kin", blocks=blocks)
        bench.tell(WorkerGone(worker=WORKERS[0], reason="test"))
        assert bench.sent[-1] == ("kin", WORKERS[1])

    def test_a_restart_voids_what_the_worker_had_ahead(self) -> None:
        bench = Bench()
        for name in ("r0", "r1"):
            bench.arrive(name)
        bench.tell(WorkerPaused(worker=ALONE[0], reason="test"))
        bench.tell(WorkerJoined(profile=profile(ALONE[0]), restarted=True))
        assert bench.order == ["r0", "r1"]

    def test_those_who_may_go_nowhere_now_keep_nobody_out(self) -> None:
        """A and B; many may go to A alone, which is paused: who comes after them goes to B."""
        bench = Bench(WORKERS[:2])
        for number in range(40):
            bench.arrive(f"r{number}", excluded=WORKERS[1:2])
        bench.tell(WorkerPaused(worker=WORKERS[0], reason="draining"))
        bench.now_ms = 60_000.0
        bench.arrive("new")
        assert bench.sent[-1] == ("new", WORKERS[1])

    def test_the_queue_of_a_worker_that_is_gone_refuses_nobody(self) -> None:
        bench = Bench(WORKERS[:1], limits=AdmissionLimits(max_expected_wait_ms=1000))
        report(bench, running=1, waiting_tokens=1_000_000)
        bench.arrive("early")
        assert [r.reason for r in bench.refused] == [RefusalReason.OVERLOADED]
        bench.tell(WorkerGone(worker=WORKERS[0], reason="test"))
        bench.tell(WorkerJoined(profile=profile(WORKERS[1])))
        assert isinstance(bench.arrive("late")[0], Dispatch)

    def test_a_queue_that_has_drained_refuses_nobody(self) -> None:
        bench = Bench(limits=AdmissionLimits(max_expected_wait_ms=500))
        report(bench, running=1, waiting_tokens=20_000)
        assert isinstance(bench.arrive("early")[0], Refusal)
        bench.now_ms += 30_000
        assert isinstance(bench.arrive("late")[0], Dispatch)

    def test_whom_a_request_excludes_it_never_gets(self) -> None:
        bench = Bench(WORKERS[:2])
        bench.arrive("r0", excluded=WORKERS[:1])
        bench.arrive("r1", excluded=WORKERS[:1])
        bench.tell(WorkerPaused(worker=WORKERS[1], reason="test"))
        assert bench.sent == [("r0", WORKERS[1])]
        bench.tell(WorkerGone(worker=WORKERS[1], reason="test"))
        assert [r.request_id for r in bench.refused] == ["r1"]


class TestLimits:
    def test_one_that_was_admitted_and_lost_its_worker_is_not_turned_away(self) -> None:
        bench = Bench(WORKERS[:2], limits=AdmissionLimits(max_expected_wait_ms=1000))
        bench.arrive("r0")
        (worker,) = [worker for name, worker in bench.sent if name == "r0"]
        for each in WORKERS[:2]:
            report(bench, running=1, waiting_tokens=1_000_000, worker=each)
        assert isinstance(bench.arrive("new")[0], Refusal)
        bench.tell(Ended(request_id="r0", outcome=Outcome.FAILED))
        bench.arrive("r0", excluded=[worker])
        assert [r.request_id for r in bench.refused] == ["new"]
        assert bench.policy.waiting + bench.order.count("r0") == 2

    def test_neither_when_the_line_is_full(self) -> None:
        bench = Bench(WORKERS[:1], limits=AdmissionLimits(max_waiting=1))
        for number in range(4):
            bench.arrive(f"r{number}", 8000)
        assert bench.policy.waiting == 1
        refused = len(bench.refused)
        bench.arrive("again", 8000, excluded=[WorkerId("gone")])
        assert (bench.policy.waiting, len(bench.refused)) == (2, refused)

    def test_a_prefix_that_is_on_its_way_shortens_the_wait_of_those_who_share_it(self) -> None:
        """4.3 s each alone; once the first of them is sent, the others have but their last block to prefill. One at a
        time is in flight."""
        tight = {"decode_limit": 0.1, "initial_output_tokens": 1.0}
        bench = Bench(limits=AdmissionLimits(max_expected_wait_ms=10_000), parameters=tight)
        bench.arrive("filler", 2000)
        document = prompt_blocks(1, 400)
        for number in range(4):
            bench.arrive(f"r{number}", blocks=document)
        assert [r.request_id for r in bench.refused] == ["r3"]
        bench.first_token("filler")
        bench.end("filler")
        assert bench.order == ["filler", "r0"]
        for number in range(2):
            bench.arrive(f"next{number}", 25_600)
        assert [r.request_id for r in bench.refused] == ["r3"]

    def test_a_worker_that_nobody_wants_does_not_have_the_line_planned_at_each_event(self) -> None:
        """Sixteen workers; 200 requests want a long prefix that fifteen hold, which are full, and one is idle."""
        workers = tuple(WorkerId(f"w{i}") for i in range(16))
        bench = Bench(workers)
        document = prompt_blocks(1, 1000)
        for worker in workers[:15]:
            bench.cache.put(worker, document)
        for number in range(260):
            bench.arrive(f"r{number}", blocks=prompt_blocks(2 + number, 1002, prefix=document))
        assert bench.policy.waiting > 150
        before = bench.policy.assigned
        for _ in range(100):
            bench.now_ms += 0.1
            bench.tell(Tick())
        assert bench.policy.assigned - before < 10 * bench.policy.waiting

    def test_it_is_looked_at_again_before_long(self) -> None:
        workers = tuple(WorkerId(f"w{i}") for i in range(16))
        bench = Bench(workers)
        document = prompt_blocks(1, 1000)
        for worker in workers[:15]:
            bench.cache.put(worker, document)
        for number in range(260):
            bench.arrive(f"r{number}", blocks=prompt_blocks(2 + number, 1002, prefix=document))
        idle = [worker for worker in workers if not bench.policy.in_flight(worker)]
        assert idle == [workers[15]]
        bench.arrive("other", 500)
        bench.now_ms += 50
        bench.tell(Tick())
        assert ("other", workers[15]) in bench.sent
