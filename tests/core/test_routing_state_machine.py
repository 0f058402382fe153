"""Every policy under random histories: what is reserved is released exactly once, whatever happens."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

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
    WorkerGone,
    WorkerJoined,
    WorkerPaused,
)
from kvrouting_core.routing.late import LatePolicy
from kvrouting_core.routing.policy import AdmissionLimits, Policy
from kvrouting_core.routing.registry import POLICY_NAMES, build_policy
from tests.fakes.routing_pool import BLOCK_TOKENS, SetCache, profile, prompt_blocks
from tests.fakes.waiting_policy import OneAtATime

LIMITS = AdmissionLimits(max_waiting=3, max_in_flight_per_worker=5, max_expected_wait_ms=4000.0)
WORKERS = tuple(WorkerId(f"w{i}") for i in range(4))
_SHARED = prompt_blocks(1, 20)
PROMPTS: tuple[list[int], ...] = (
    _SHARED,
    prompt_blocks(2, 40, prefix=_SHARED),
    prompt_blocks(3, 30, prefix=_SHARED[:10]),
    prompt_blocks(4, 5),
    [],
)
SETTINGS = settings(
    max_examples=25, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)

workers = st.sampled_from(WORKERS)
pick = st.integers(0, 10_000)


@dataclass
class Known:
    """A request as the model knows it. worker: None while it waits."""

    request: RoutingRequest
    worker: WorkerId | None = None
    first_token: bool = False
    prefix_arrived: bool = False


class History(RuleBasedStateMachine):
    """Sends random events and keeps a model of who is where."""

    make: Callable[[SetCache], Policy]

    def __init__(self) -> None:
        super().__init__()
        self.cache = SetCache()
        self.policy = type(self).make(self.cache)
        self.now_ms = 1000.0
        self.number = 0
        self.eligible: dict[WorkerId, bool] = {}
        self.alive: dict[str, Known] = {}
        self.failed: list[Known] = []
        self.totals: dict[WorkerId, tuple[int, int]] = {}

    # What is done

    def send(self, event: Event) -> Sequence[Action]:
        actions = self.policy.handle(event, now_ms=self.now_ms)
        for action in actions:
            self.answered(action)
        return actions

    def answered(self, action: Action) -> None:
        known = self.alive[action.request_id]
        assert known.worker is None, f"{action.request_id} is answered twice"
        if isinstance(action, Refusal):
            if action.reason is RefusalReason.NO_WORKER:
                assert not self.may_go(known.request)
                assert action.retry_after_ms == 0
            else:
                assert action.retry_after_ms >= 1000
            del self.alive[action.request_id]
            return
        assert self.eligible.get(action.worker), f"{action.worker} is paused, gone or unknown"
        assert action.worker not in known.request.excluded
        decision = action.decision
        assert decision.worker == action.worker
        assert decision.chosen.uncached_tokens >= 1
        assert all(c.credited_tokens >= c.matched_tokens for c in decision.candidates)
        known.worker = action.worker

    def may_go(self, request: RoutingRequest) -> list[WorkerId]:
        return [w for w, eligible in self.eligible.items() if eligible and w not in request.excluded]

    def dispatched(self) -> list[Known]:
        return [k for k in self.alive.values() if k.worker is not None]

    def chosen(self, among: Sequence[Known], number: int) -> Known:
        return among[number % len(among)]

    @initialize(count=st.integers(0, 3))
    def begin(self, count: int) -> None:
        for worker in WORKERS[:count]:
            self.join(worker, restarted=False)

    @rule(passed=st.sampled_from([0.0, 1.0, 20.0, 300.0, 5000.0]))
    def wait(self, passed: float) -> None:
        self.now_ms += passed

    @rule(
        prompt=st.sampled_from(PROMPTS),
        excluded=st.sets(workers, max_size=3),
        extra=st.integers(1, 3000),
        sequences=st.integers(1, 3),
        limit=st.sampled_from([None, 0, 5]),
    )
    def arrive(self, prompt: list[int], excluded: set[WorkerId], extra: int, sequences: int, limit: int | None) -> None:
        self.number += 1
        request = RoutingRequest(
            request_id=f"r{self.number}",
            blocks=prompt,
            prompt_tokens=len(prompt) * BLOCK_TOKENS + extra,
            sequences=sequences,
            max_output_tokens=limit,
            excluded=frozenset(excluded),
        )
        self.take(request)

    def take(self, request: RoutingRequest) -> None:
        self.alive[request.request_id] = Known(request)
        actions = self.send(Arrival(request=request))
        if not isinstance(self.policy, (OneAtATime, LatePolicy)):
            assert [a.request_id for a in actions] == [request.request_id]

    @precondition(lambda self: self.failed)
    @rule(number=pick)
    def retry(self, number: int) -> None:
        failed = self.failed.pop(number % len(self.failed))
        assert failed.worker is not None
        old = failed.request
        self.take(
            RoutingRequest(
                request_id=old.request_id,
                blocks=old.blocks,
                prompt_tokens=old.prompt_tokens,
                excluded=old.excluded | {failed.worker},
            )
        )

    @precondition(lambda self: any(not k.first_token for k in self.dispatched()))
    @rule(number=pick)
    def first_token(self, number: int) -> None:
        known = self.chosen([k for k in self.dispatched() if not k.first_token], number)
        known.first_token = True
        self.send(FirstToken(request_id=known.request.request_id))

    @precondition(lambda self: any(not k.prefix_arrived for k in self.dispatched()))
    @rule(number=pick)
    def prefix_arrived(self, number: int) -> None:
        known = self.chosen([k for k in self.dispatched() if not k.prefix_arrived], number)
        known.prefix_arrived = True
        assert known.worker is not None
        self.cache.put(known.worker, known.request.blocks)
        self.send(PrefixArrived(request_id=known.request.request_id))

    @precondition(lambda self: self.alive)
    @rule(number=pick, outcome=st.sampled_from(Outcome), tokens=st.sampled_from([None, 0, 4, 500]))
    def end(self, number: int, outcome: Outcome, tokens: int | None) -> None:
        known = self.chosen(list(self.alive.values()), number)
        if known.worker is None and outcome is Outcome.COMPLETED:
            outcome = Outcome.CANCELLED
        request_id = known.request.request_id
        del self.alive[request_id]
        self.send(Ended(request_id=request_id, outcome=outcome, output_tokens=tokens))
        if outcome is Outcome.FAILED and known.worker is not None:
            self.failed.append(known)

    @rule(worker=workers, restarted=st.booleans())
    def join(self, worker: WorkerId, restarted: bool) -> None:
        self.eligible[worker] = True
        if restarted:
            self.cache.held.pop(worker, None)
        worker_class = "H200" if worker == WORKERS[3] else "L40"
        self.send(WorkerJoined(profile=profile(worker, worker_class), restarted=restarted))

    @precondition(lambda self: self.eligible)
    @rule(number=pick)
    def pause(self, number: int) -> None:
        worker = list(self.eligible)[number % len(self.eligible)]
        self.eligible[worker] = False
        self.send(WorkerPaused(worker=worker, reason="test"))

    @precondition(lambda self: self.eligible)
    @rule(number=pick)
    def leave(self, number: int) -> None:
        worker = list(self.eligible)[number % len(self.eligible)]
        del self.eligible[worker]
        self.cache.held.pop(worker, None)
        self.send(WorkerGone(worker=worker, reason="test"))

    @precondition(lambda self: self.eligible)
    @rule(
        number=pick,
        counts=st.tuples(st.integers(0, 20), st.integers(0, 20), st.integers(0, 30_000)),
        step=st.tuples(st.integers(0, 900_000), st.integers(0, 9000)),
        back=st.booleans(),
        delay=st.sampled_from([0.0, 30.0]),
    )
    def report(
        self, number: int, counts: tuple[int, int, int], step: tuple[int, int], back: bool, delay: float
    ) -> None:
        worker = list(self.eligible)[number % len(self.eligible)]
        busy_us, tokens = (0, 0) if back else self.totals.get(worker, (0, 0))
        self.totals[worker] = busy_us + step[0], tokens + step[1]
        report = LoadReport(
            worker=worker,
            reported_ms=self.now_ms - delay,
            running_requests=counts[0],
            waiting_requests=counts[1],
            used_tokens=0,
            waiting_uncached_tokens=counts[2],
            total_prefill_uncached_tokens=self.totals[worker][1],
            total_prefill_busy_us=self.totals[worker][0],
        )
        self.send(report)

    @rule(kind=st.integers(0, 7), number=pick)
    def contradict(self, kind: int, number: int) -> None:
        for event in self.contradictions(kind, number):
            before = self.policy.beliefs(now_ms=self.now_ms), self.policy.waiting
            with pytest.raises(ValueError, match=r".+"):
                self.policy.handle(event, now_ms=self.now_ms)
            assert (self.policy.beliefs(now_ms=self.now_ms), self.policy.waiting) == before

    def contradictions(self, kind: int, number: int) -> list[Event]:
        unknown: list[Event] = [
            FirstToken(request_id="never"),
            PrefixArrived(request_id="never"),
            Ended(request_id="never", outcome=Outcome.COMPLETED),
            WorkerPaused(worker=WorkerId("never"), reason="test"),
            WorkerGone(worker=WorkerId("never"), reason="test"),
        ]
        if kind < len(unknown) or not self.alive:
            return [unknown[kind % len(unknown)]]
        known = self.chosen(list(self.alive.values()), number)
        again: list[Event] = [Arrival(request=known.request)]
        if known.worker is None:
            again.append(FirstToken(request_id=known.request.request_id))
            again.append(Ended(request_id=known.request.request_id, outcome=Outcome.COMPLETED))
        if known.first_token:
            again.append(FirstToken(request_id=known.request.request_id))
        if known.prefix_arrived:
            again.append(PrefixArrived(request_id=known.request.request_id))
        return again

    # What holds

    @invariant()
    def counts_are_true(self) -> None:
        for worker in WORKERS:
            expected = sum(k.worker == worker for k in self.alive.values())
            assert self.policy.in_flight(worker) == expected
        assert self.policy.waiting == sum(k.worker is None for k in self.alive.values())
        beliefs = {b.worker: b for b in self.policy.beliefs(now_ms=self.now_ms)}
        assert {w: b.eligible for w, b in beliefs.items()} == self.eligible
        for belief in beliefs.values():
            assert belief.queue_ms >= 0
            assert belief.speed_factor > 0

    def teardown(self) -> None:
        for request_id in list(self.alive):
            if request_id in self.alive:  # the end of another may have answered it meanwhile
                known = self.alive.pop(request_id)
                outcome = Outcome.CANCELLED if known.worker is None else Outcome.COMPLETED
                self.send(Ended(request_id=request_id, outcome=outcome))
        assert not self.alive
        assert self.policy.waiting == 0
        assert all(self.policy.in_flight(worker) == 0 for worker in WORKERS)
        if self.totals:
            self.now_ms += 20_000.0  # reports of others' load have lost their force
        for belief in self.policy.beliefs(now_ms=self.now_ms):
            assert belief.queue_ms == pytest.approx(0.0, abs=1e-6)
        for number, prompt in enumerate(PROMPTS):
            self.no_credit_is_left(f"probe{number}", prompt)

    def no_credit_is_left(self, request_id: str, prompt: list[int]) -> None:
        request = RoutingRequest(request_id=request_id, blocks=prompt, prompt_tokens=len(prompt) * BLOCK_TOKENS + 1)
        (action,) = self.policy.handle(Arrival(request=request), now_ms=self.now_ms)
        if isinstance(action, Dispatch):
            assert all(c.credited_tokens == c.matched_tokens for c in action.decision.candidates)
            self.policy.handle(Ended(request_id=request_id, outcome=Outcome.CANCELLED), now_ms=self.now_ms)
        else:
            assert not any(self.eligible.values())


VARIANTS: dict[str, tuple[str, dict[str, object]]] = {
    **{name: (name, {}) for name in POLICY_NAMES},
    "lbgr without our terms": (
        "lbgr",
        {"queue": "decayed", "price": 0, "decode_price": 0, "learned_speed": "off"},
    ),
    "lbgr with residual": ("lbgr", {"residual": "on"}),
    "lbgr, immediate": ("lbgr", {"binding": "immediate"}),
    "lbgr bound late": ("lbgr", {"binding": "late"}),
    "lbgr bound late, tight": (
        "lbgr",
        {"binding": "late", "release_ahead_ms": 1, "decode_limit": 0.1, "residual": "on", "exploration_share": 0.5},
    ),
    "lbgr bound late, nothing else": (
        "lbgr",
        {"binding": "late", "price": 0, "decode_price": 0, "size_precedence": 0, "decode_limit": 0},
    ),
    "lbgr exploring": ("lbgr", {"exploration_share": 0.5, "exploration_requests": 2, "price": 2}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_policy_keeps_its_books(variant: str) -> None:
    name, parameters = VARIANTS[variant]

    class PolicyHistory(History):
        @staticmethod
        def make(cache: SetCache) -> Policy:
            return build_policy(
                name, parameters, cache=cache, block_size_tokens=BLOCK_TOKENS, rng=random.Random(1), limits=LIMITS
            )

    run_state_machine_as_test(PolicyHistory, settings=SETTINGS)


@pytest.mark.parametrize("at_once", [1, 3])
def test_waiting_policy_keeps_its_books(at_once: int) -> None:
    class WaitingHistory(History):
        @staticmethod
        def make(cache: SetCache) -> Policy:
            return OneAtATime(at_once=at_once, limits=LIMITS)

    run_state_machine_as_test(WaitingHistory, settings=SETTINGS)
