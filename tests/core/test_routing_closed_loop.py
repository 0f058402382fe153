"""Policies in a closed loop with a toy pool: what is learned changes what is chosen, and that what is learned."""

from __future__ import annotations

import heapq
import itertools
import random
import statistics
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import pytest

from kvrouting_core.identity import WorkerId
from kvrouting_core.routing.admission import Admission, Overload
from kvrouting_core.routing.choice import Choice
from kvrouting_core.routing.decision import Candidate
from kvrouting_core.routing.events import Ended, RoutingRequest
from kvrouting_core.routing.immediate import ImmediatePolicy
from kvrouting_core.routing.lbgr import Lbgr
from kvrouting_core.routing.ledger import Reservation, Worker
from kvrouting_core.routing.parameters import LbgrParameters
from kvrouting_core.routing.policy import AdmissionLimits, WorkerBelief
from tests.fakes.routing_pool import BLOCK_TOKENS, RoutingPool, prompt_blocks

PREFILL_MS_PER_TOKEN = 0.112
ANSWER_TOKENS = 4
STEP_MS = 21.0
Slowness = Callable[[str, float], float]


def steady(worker: str, now_ms: float) -> float:
    return 1.0


@dataclass
class ToyEngine:
    """One server, first come first served, whose cache holds the last few prefixes."""

    groups_held: int
    free_at_ms: float = 0.0
    held: OrderedDict[int, None] = field(default_factory=OrderedDict)
    busy_ms: float = 0.0
    tokens: int = 0

    def prefill(self, group: int, tokens: int, prefix_tokens: int, slowness: float, now_ms: float) -> float:
        """Returns: when the first token comes."""
        new = tokens - prefix_tokens if group in self.held else tokens
        self.held[group] = None
        self.held.move_to_end(group)
        if len(self.held) > self.groups_held:
            self.held.popitem(last=False)
        took_ms = slowness * (6 + PREFILL_MS_PER_TOKEN * new)
        self.busy_ms += took_ms
        self.tokens += new
        self.free_at_ms = max(self.free_at_ms, now_ms) + took_ms
        return self.free_at_ms


@dataclass
class Load:
    """Groups of requests that share half of their prompt, arriving by Poisson."""

    per_second: float
    requests: int
    groups: int = 24
    tokens: int = 4096
    groups_held: int = 8


class Loop:
    """Plays a load through a pool; the pool's index mirrors the engines' caches."""

    def __init__(self, pool: RoutingPool, workers: Sequence[str], load: Load, slowness: Slowness = steady) -> None:
        self.pool, self.load, self.slowness = pool, load, slowness
        self.engines = {w: ToyEngine(load.groups_held) for w in workers}
        blocks = load.tokens // 2 // BLOCK_TOKENS
        self.prefixes = [prompt_blocks(group, blocks) for group in range(load.groups)]
        self.latencies_ms: list[float] = []
        self.chosen: list[str] = []
        self._order = itertools.count()
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []

    def run(self, seed: int) -> Loop:
        rng, at_ms = random.Random(seed), 0.0
        for number in range(self.load.requests):
            at_ms += rng.expovariate(self.load.per_second / 1000)
            self._at(at_ms, partial(self._arrive, number, rng.randrange(self.load.groups)))
        for second in range(1, int(at_ms / 1000)):
            self._at(second * 1000.0, self._report)
        while self._agenda:
            self.pool.now_ms, _, act = heapq.heappop(self._agenda)
            act()
        return self

    def _at(self, at_ms: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (at_ms, next(self._order), act))

    def _arrive(self, number: int, group: int) -> None:
        pool, name, arrived_ms = self.pool, f"r{number}", self.pool.now_ms
        worker = str(pool.decide(name, blocks=self.prefixes[group], tokens=self.load.tokens).worker)
        engine = self.engines[worker]
        slowness = self.slowness(worker, arrived_ms)
        first_ms = engine.prefill(group, self.load.tokens, self.load.tokens // 2, slowness, arrived_ms)
        end_ms = first_ms + (ANSWER_TOKENS - 1) * STEP_MS
        self.chosen.append(worker)
        self.latencies_ms.append(end_ms - arrived_ms)
        self._at(first_ms, lambda: self._first_token(name, worker))
        self._at(end_ms, lambda: pool.end(name, output_tokens=ANSWER_TOKENS))

    def _first_token(self, name: str, worker: str) -> None:
        held = {block for group in self.engines[worker].held for block in self.prefixes[group]}
        self.pool.cache.held[WorkerId(worker)] = held
        self.pool.first_token(name)
        self.pool.prefix_arrived(name)

    def _report(self) -> None:
        for worker, engine in self.engines.items():
            if worker in {b.worker for b in self.pool.policy.beliefs(now_ms=self.pool.now_ms)}:
                self.pool.report(worker, busy_ms=engine.busy_ms, tokens=engine.tokens)


FOUR = ("a", "b", "c", "d")


def median_and_tail(policy: str, seed: int, parameters: dict[str, object] | None = None) -> tuple[float, float]:
    pool = RoutingPool(policy, *FOUR, seed=seed, parameters=parameters)
    latencies = Loop(pool, FOUR, Load(per_second=10, requests=800)).run(seed).latencies_ms
    return statistics.median(latencies), statistics.quantiles(latencies, n=20)[18]


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("other", ["random", "round_robin", "least_load"])
def test_lbgr_beats_the_blind_policies(other: str, seed: int) -> None:
    ours, theirs = median_and_tail("lbgr", seed), median_and_tail(other, seed)
    assert ours[0] < 0.8 * theirs[0]
    assert ours[1] < 0.8 * theirs[1]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_paper_form_beats_random(seed: int) -> None:
    assert median_and_tail("lbgr-paper", seed)[0] < 0.8 * median_and_tail("random", seed)[0]


def test_a_worker_that_slows_down_gets_less() -> None:
    def slow_later(worker: str, now_ms: float) -> float:
        return 3.0 if worker == "a" and now_ms > 20_000 else 1.0

    counts = {}
    for learned in ("on", "off"):
        pool = RoutingPool("lbgr", *FOUR, parameters={"learned_speed": learned, "residual": "off"})
        chosen = Loop(pool, FOUR, Load(per_second=8, requests=800), slow_later).run(5).chosen
        counts[learned] = chosen[400:].count("a")
    assert counts["on"] < counts["off"]
    assert counts["on"] < 0.7 * 100


class LoneBias:
    """What must not be done: one bias per worker, on top of s + P, that only its own observations move."""

    def __init__(self, inner: Lbgr) -> None:
        self.inner = inner
        self.bias: dict[str, tuple[float, int]] = {}
        self.predicted: dict[str, Candidate] = {}

    def choose(self, request: RoutingRequest, workers: Sequence[Worker], *, now_ms: float) -> Choice | Overload:
        choice = self.inner.choose(request, workers, now_ms=now_ms)
        assert isinstance(choice, Choice)
        best = min(choice.candidates, key=lambda c: c.cost_ms + self.bias.get(c.worker, (0.0, 0))[0])
        return choice._replace(chosen=best)

    def reserved(self, reservation: Reservation, chosen: Candidate) -> None:
        self.inner.reserved(reservation, chosen)
        self.predicted[reservation.request.request_id] = chosen

    def ended(self, reservation: Reservation, event: Ended, *, now_ms: float) -> None:
        self.inner.ended(reservation, event, now_ms=now_ms)
        predicted = self.predicted.pop(event.request_id)
        missed_ms = now_ms - reservation.dispatched_ms - predicted.prediction_ms
        mean, count = self.bias.get(predicted.worker, (0.0, 0))
        self.bias[predicted.worker] = (mean + (missed_ms - mean) / (count + 1), count + 1)

    def joined(self, worker: Worker, *, anew: bool) -> None:
        self.inner.joined(worker, anew=anew)

    def left(self, worker: Worker) -> None:
        self.inner.left(worker)

    def first_token(self, reservation: Reservation, *, now_ms: float) -> None:
        self.inner.first_token(reservation, now_ms=now_ms)

    def belief(self, worker: Worker, *, now_ms: float) -> WorkerBelief:
        return self.inner.belief(worker, now_ms=now_ms)


def unlucky_first_seconds(worker: str, now_ms: float) -> float:
    return 60.0 if worker == "a" and now_ms < 1_000 else 1.0


class TestUnluckyWorker:
    """Worker a hangs for half a minute at the start and is as good as b afterwards. b alone can just bear the load."""

    def later(self, pool: RoutingPool) -> tuple[int, float]:
        """Of the last half: how often a was chosen, and the median latency."""
        load = Load(per_second=2.0, requests=500, groups=200, groups_held=1)
        loop = Loop(pool, ("a", "b"), load, unlucky_first_seconds).run(3)
        return loop.chosen[250:].count("a"), statistics.median(loop.latencies_ms[250:])

    def test_a_lone_bias_never_forgives(self) -> None:
        pool = RoutingPool("lbgr")
        inner = Lbgr(
            LbgrParameters(residual=False, price=0.0),
            cache=pool.cache,
            block_size_tokens=BLOCK_TOKENS,
            rng=random.Random(1),
            admission=Admission(AdmissionLimits()),
        )
        lone = LoneBias(inner)
        pool.policy = ImmediatePolicy("lone", lone, admission=Admission(AdmissionLimits()), observer=lone)
        for worker in ("a", "b"):
            pool.join(worker)
        chosen, median_ms = self.later(pool)
        _, ours_ms = self.later(RoutingPool("lbgr", "a", "b", parameters={"residual": "on"}))
        assert chosen == 0
        assert median_ms > 3 * ours_ms

    @pytest.mark.parametrize("parameters", [{}, {"price": 0}, {"queue": "decayed"}])
    def test_ours_does(self, parameters: dict[str, object]) -> None:
        chosen, median_ms = self.later(RoutingPool("lbgr", "a", "b", parameters={"residual": "on", **parameters}))
        assert 75 <= chosen <= 175
        assert median_ms < 1500
