"""Late binding: who waits, who is refused, and when nobody is."""

from __future__ import annotations

from kvrouting_core.identity import WorkerId
from kvrouting_core.routing.decision import Dispatch, Refusal, RefusalReason
from kvrouting_core.routing.events import (
    Ended,
    Outcome,
    Tick,
    WorkerGone,
    WorkerJoined,
    WorkerPaused,
)
from kvrouting_core.routing.policy import AdmissionLimits
from tests.core.late_bench import ALONE, WORKERS, Bench, report
from tests.fakes.routing_pool import profile, prompt_blocks

SIXTEEN = tuple(WorkerId(f"w{i}") for i in range(16))


def crowd_beside_an_idle_worker() -> Bench:
    """260 requests want a long prefix that fifteen workers hold, which are full; the sixteenth is idle."""
    bench = Bench(SIXTEEN)
    document = prompt_blocks(1, 1000)
    for worker in SIXTEEN[:15]:
        bench.cache.put(worker, document)
    for number in range(260):
        bench.arrive(f"r{number}", blocks=prompt_blocks(2 + number, 1002, prefix=document))
    return bench


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
        bench = crowd_beside_an_idle_worker()
        assert bench.policy.waiting > 150
        before = bench.policy.assigned
        for _ in range(100):
            bench.now_ms += 0.1
            bench.tell(Tick())
        assert bench.policy.assigned - before < 10 * bench.policy.waiting

    def test_it_is_looked_at_again_before_long(self) -> None:
        bench = crowd_beside_an_idle_worker()
        assert [worker for worker in SIXTEEN if not bench.policy.in_flight(worker)] == [SIXTEEN[15]]
        bench.arrive("other", 500)
        bench.now_ms += 50
        bench.tell(Tick())
        assert ("other", SIXTEEN[15]) in bench.sent
