"""Late binding in whole histories: it sends as its definition says, nobody starves, and nothing is lost."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvrouting_core.identity import WorkerId
from kvrouting_core.routing.decision import Action, Dispatch
from kvrouting_core.routing.events import (
    Arrival,
    Ended,
    Event,
    FirstToken,
    Outcome,
    PrefixArrived,
    RoutingRequest,
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
    for worker_index, worker in enumerate(WORKERS):
        policy.handle(WorkerJoined(profile=profile(worker, "H200" if worker_index == 2 else "L40")), now_ms=0.0)


def late(cache: SetCache, parameters: LbgrParameters, *, seed: int = 5) -> LatePolicy:
    return LatePolicy(
        "lbgr",
        parameters,
        cache=cache,
        block_size_tokens=BLOCK_TOKENS,
        rng=random.Random(seed),
        limits=AdmissionLimits(),
    )


_VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"price_queue": "mean"},
    {"price_queue": "own"},
    {"price_at_pool_speed": False},
    {"limit_rises": False},
    {"size_precedence": 0.0, "price": 1.0},
)


class TestHistories:
    @SETTINGS
    @given(chosen=arrivals, variant=st.sampled_from(_VARIANTS))
    def test_it_sends_as_the_obvious_plan_does(
        self, chosen: Sequence[tuple[float, Sequence[int], int, int]], variant: Mapping[str, Any]
    ) -> None:
        cache = SetCache()
        parameters = LbgrParameters(binding="late", exploration_share=0, **variant)
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
            for passing in requests:
                if passing.arrived_ms > passed.arrived_ms and passing.sent_ms < passed.sent_ms:
                    assert passing.arrived_ms <= passed.arrived_ms + precedence * longest_ms(passed)

    @SETTINGS
    @given(
        before=arrivals,
        prefix=st.sampled_from(_PREFIXES),
        own_blocks=st.integers(0, 200),
        hot=st.sampled_from(_PREFIXES),
        precedence=st.sampled_from([0.0, 2.0]),
    )
    def test_a_stream_of_later_requests_that_the_pool_cannot_serve_keeps_nobody_waiting(
        self,
        before: Sequence[tuple[float, Sequence[int], int, int]],
        prefix: Sequence[int],
        own_blocks: int,
        hot: Sequence[int],
        precedence: float,
    ) -> None:
        """On three workers a request may be passed where it does not want to go. Still it waits at most until all that
        was due before it is done, though it be one after the other."""
        cache = SetCache()
        policy = late(cache, LbgrParameters(binding="late", size_precedence=precedence))
        join_all(policy)
        servers = Servers(lambda event, now_ms: policy.handle(event, now_ms=now_ms), cache)
        chosen = [*before, (0.0, prefix, own_blocks, 1), *((5.0, hot, 20, 1) for _ in range(300))]
        planned(servers, chosen)
        servers.run()
        one = servers.requests[f"r{len(before)}"]
        due_ms = one.arrived_ms + precedence * longest_ms(one)
        ahead = [r for r in servers.requests.values() if r.arrived_ms <= due_ms]
        assert one.sent_ms - one.arrived_ms <= 100 + sum(longest_ms(r) + 6 + 75 for r in ahead)

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


def longest_ms(served: Served) -> float:
    """More than its prefill takes on the slowest worker, with nothing cached."""
    return 1.3 * MS_PER_TOKEN * served.request.prompt_tokens


def _sent(actions: Sequence[Action]) -> list[tuple[str, WorkerId]]:
    return [(action.request_id, action.worker) for action in actions if isinstance(action, Dispatch)]
