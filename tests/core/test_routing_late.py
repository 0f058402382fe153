"""Late binding: what waits, in which order it goes, and that nothing is lost."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvrouting_core.identity import WorkerId
from kvrouting_core.routing.decision import Action, Dispatch, Refusal, RefusalReason
from kvrouting_core.routing.events import (
    Arrival,
    Ended,
    Event,
    FirstToken,
    LoadReport,
    Outcome,
    PrefixArrived,
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
from tests.fakes.obvious_plan import ObviousPlan
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


# --- whole histories ---


@dataclass
class Served:
    """What a request meets: when it arrived, when it was sent and where."""

    request: RoutingRequest
    arrived_ms: float
    sent_ms: float = math.inf
    worker: WorkerId | None = None


@dataclass
class Servers:
    """Engines that prefill one request after the other and then decode; every event of them goes to the policy."""

    tell: Callable[[Event, float], Sequence[Action]]
    cache: SetCache
    requests: dict[str, Served] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)
    due: list[tuple[float, int, Event]] = field(default_factory=list)
    free_ms: dict[WorkerId, float] = field(default_factory=dict)
    count: int = 0

    def plan(self, at_ms: float, event: Event) -> None:
        self.count += 1
        heapq.heappush(self.due, (at_ms, self.count, event))

    def run(self) -> None:
        while self.due:
            now_ms, _, event = heapq.heappop(self.due)
            if isinstance(event, Arrival):
                self.requests[event.request.request_id] = Served(event.request, now_ms)
            for action in self.tell(event, now_ms):
                if isinstance(action, Dispatch):
                    self.serve(action, now_ms)
                else:
                    self.refused.append(action.request_id)
            if isinstance(event, FirstToken):
                served = self.requests[event.request_id]
                assert served.worker is not None
                self.cache.put(served.worker, served.request.blocks)
                self.tell(PrefixArrived(request_id=event.request_id), now_ms)

    def serve(self, action: Dispatch, now_ms: float) -> None:
        served = self.requests[action.request_id]
        assert served.worker is None, f"{action.request_id} is sent twice"
        served.sent_ms, served.worker = now_ms, action.worker
        chosen = action.decision.chosen
        begin_ms = max(now_ms + 1, self.free_ms.get(action.worker, 0.0))
        done_ms = begin_ms + 6 + MS_PER_TOKEN * chosen.uncached_tokens
        self.free_ms[action.worker] = done_ms
        self.plan(done_ms, FirstToken(request_id=action.request_id))
        ended = Ended(request_id=action.request_id, outcome=Outcome.COMPLETED, output_tokens=4)
        self.plan(done_ms + 75, ended)


_SHARED = prompt_blocks(1, 40)
_PREFIXES: tuple[list[int], ...] = ([], _SHARED[:20], _SHARED, prompt_blocks(2, 10))
arrivals = st.lists(
    st.tuples(st.floats(0, 400, allow_nan=False), st.sampled_from(_PREFIXES), st.integers(0, 60), st.integers(1, 63)),
    min_size=1,
    max_size=40,
)


def planned(servers: Servers, chosen: Sequence[tuple[float, Sequence[int], int, int]]) -> None:
    now_ms = 0.0
    for number, (gap_ms, prefix, own_blocks, rest) in enumerate(chosen):
        now_ms += gap_ms
        blocks = prompt_blocks(100 + number, len(prefix) + own_blocks, prefix=prefix)
        tokens = len(blocks) * BLOCK_TOKENS + rest
        request = RoutingRequest(request_id=f"r{number}", blocks=blocks, prompt_tokens=tokens)
        servers.plan(now_ms, Arrival(request=request))


def join_all(policy: LatePolicy | ObviousPlan) -> None:
    for place, worker in enumerate(WORKERS):
        policy.handle(WorkerJoined(profile=profile(worker, "H200" if place == 2 else "L40")), now_ms=0.0)


def late(cache: SetCache, parameters: LbgrParameters, *, seed: int = 5) -> LatePolicy:
    return LatePolicy(
        "lbgr",
        parameters,
        cache=cache,
        block_size_tokens=BLOCK_TOKENS,
        rng=random.Random(seed),
        limits=AdmissionLimits(),
    )


class TestHistories:
    @SETTINGS
    @given(chosen=arrivals)
    def test_it_sends_as_the_obvious_plan_does(self, chosen: Sequence[tuple[float, Sequence[int], int, int]]) -> None:
        cache = SetCache()
        parameters = LbgrParameters(binding="late", exploration_share=0)
        ours = late(cache, parameters)
        obvious = ObviousPlan(parameters, cache=cache, block_size_tokens=BLOCK_TOKENS, rng=random.Random(5))

        def tell(event: Event, now_ms: float) -> Sequence[Action]:
            actions = ours.handle(event, now_ms=now_ms)
            expected = obvious.handle(event, now_ms=now_ms)
            assert _sent(actions) == _sent(expected)
            return actions

        join_all(ours)
        join_all(obvious)
        servers = Servers(tell, cache)
        planned(servers, chosen)
        servers.run()
        assert all(s.worker for s in servers.requests.values())

    @SETTINGS
    @given(chosen=arrivals, precedence=st.sampled_from([0.0, 2.0]))
    def test_on_one_worker_nobody_is_passed_but_by_arrivals_within_their_precedence(
        self, chosen: Sequence[tuple[float, Sequence[int], int, int]], precedence: float
    ) -> None:
        cache = SetCache()
        policy = late(cache, LbgrParameters(binding="late", size_precedence=precedence))
        policy.handle(WorkerJoined(profile=profile(ALONE[0])), now_ms=0.0)
        servers = Servers(lambda event, now_ms: policy.handle(event, now_ms=now_ms), cache)
        planned(servers, chosen)
        servers.run()
        requests = list(servers.requests.values())
        for passed in requests:
            longest_ms = 1.3 * MS_PER_TOKEN * passed.request.prompt_tokens
            for passing in requests:
                if passing.arrived_ms > passed.arrived_ms and passing.sent_ms < passed.sent_ms:
                    assert passing.arrived_ms <= passed.arrived_ms + precedence * longest_ms

    @SETTINGS
    @given(chosen=arrivals, pause_ms=st.floats(0, 3000), gone_ms=st.floats(0, 3000))
    def test_each_request_is_sent_once_though_workers_pause_and_go(
        self, chosen: Sequence[tuple[float, Sequence[int], int, int]], pause_ms: float, gone_ms: float
    ) -> None:
        cache = SetCache()
        policy = late(cache, LbgrParameters(binding="late"))
        join_all(policy)
        servers = Servers(lambda event, now_ms: policy.handle(event, now_ms=now_ms), cache)
        planned(servers, chosen)
        servers.plan(pause_ms, WorkerPaused(worker=WORKERS[0], reason="test"))
        servers.plan(pause_ms + 500, WorkerJoined(profile=profile(WORKERS[0])))
        servers.plan(gone_ms, WorkerGone(worker=WORKERS[1], reason="test"))
        servers.run()
        assert not servers.refused
        assert all(s.worker for s in servers.requests.values())
        assert (policy.waiting, [policy.in_flight(w) for w in WORKERS]) == (0, [0, 0, 0])

    @SETTINGS
    @given(chosen=arrivals)
    def test_the_same_seed_gives_the_same_decisions(
        self, chosen: Sequence[tuple[float, Sequence[int], int, int]]
    ) -> None:
        def decisions() -> list[Action]:
            cache, made = SetCache(), list[Action]()
            policy = late(cache, LbgrParameters(binding="late"))

            def tell(event: Event, now_ms: float) -> Sequence[Action]:
                actions = policy.handle(event, now_ms=now_ms)
                made.extend(actions)
                return actions

            join_all(policy)
            servers = Servers(tell, cache)
            planned(servers, chosen)
            servers.run()
            return made

        assert decisions() == decisions()


def _sent(actions: Sequence[Action]) -> list[tuple[str, WorkerId]]:
    return [(action.request_id, action.worker) for action in actions if isinstance(action, Dispatch)]
