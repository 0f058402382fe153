"""One worker on the virtual clock: an engine model that steps whenever it has something to do, and can die."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvrouting_core.blocks import ChainHasher, Namespace
from kvrouting_core.deltas import Delta
from kvrouting_core.eviction import EvictionPolicy, make_policy
from kvrouting_core.identity import WorkerId
from kvrouting_core.radix_cache import RadixCache
from kvrouting_core.routing.events import WorkerProfile
from kvrouting_core.service_time import worker_class
from kvrouting_simulator.engine_model import (
    AnswerToken,
    EngineLoad,
    EngineModel,
    EngineRequest,
    Step,
    TokenProduced,
)
from kvrouting_simulator.experiment.clock import VirtualClock
from kvrouting_simulator.experiment.index_feed import IndexFeed, index_feed
from kvrouting_simulator.experiment.scenario import WorkerSpec


def named_eviction(worker: WorkerId, spec: WorkerSpec, rng: random.Random) -> EvictionPolicy[Any]:  # noqa: ARG001
    """The eviction policy that the worker's spec names."""
    return make_policy(spec.eviction, rng)


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineParts:
    """What the engines of a simulation are made of, where an experiment looks into them.

    eviction: makes the policy of a new engine of a worker. cache: the class of its cache.
    """

    eviction: Callable[[WorkerId, WorkerSpec, random.Random], EvictionPolicy[Any]] = named_eviction
    cache: type[RadixCache] = RadixCache


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What the end of a step brought: tokens, and the changes of the cache since the one before."""

    tokens: Sequence[TokenProduced]
    deltas: Sequence[Delta]


class SimulatedWorker:
    """An engine that may be replaced by a new one with an empty cache.

    on_step: told of each moment that brought tokens or changed the cache.
    """

    def __init__(
        self,
        *,
        worker: WorkerId,
        spec: WorkerSpec,
        seed: int,
        clock: VirtualClock,
        blocks: ChainHasher,
        namespace: Namespace,
        answer_token: AnswerToken,
        on_step: Callable[[SimulatedWorker, StepResult], None],
        parts: EngineParts | None = None,
    ) -> None:
        self.worker = worker
        self.spec = spec
        self._parts = parts or EngineParts()
        self._rng = random.Random(f"{seed}/eviction/{worker}")
        self._clock = clock
        self._blocks = blocks
        self._namespace = namespace
        self._answer_token = answer_token
        self._on_step = on_step
        self._busy_us_before = 0
        self._served: set[str] = set()
        self.incarnation = 0
        self._engine: EngineModel | None = None
        self.start()

    @property
    def profile(self) -> WorkerProfile:
        """What it says of itself when it joins."""
        told = self.spec.told_class or self.spec.worker_class
        times, factor = None, self.spec.told_prefill_factor
        if factor != 1:
            truth = worker_class(told).times
            times = replace(
                truth,
                prefill_ms_per_token=factor * truth.prefill_ms_per_token,
                attention_ms_per_token_pair=factor * truth.attention_ms_per_token_pair,
            )
        return WorkerProfile(
            worker=self.worker,
            worker_class=told,
            times=times,
            capacity_tokens=self.spec.tokens,
            page_size_tokens=self.spec.page_size,
            scheduler=self.spec.scheduler,
        )

    @property
    def alive(self) -> bool:
        """Whether there is an engine."""
        return self._engine is not None

    @property
    def busy_ms(self) -> float:
        """Time inside steps, of all its engines."""
        now = self._engine.load().total_busy_us if self._engine else 0
        return (self._busy_us_before + now) / 1000

    def load(self) -> EngineLoad | None:
        """The engine's report; None if there is none."""
        return self._engine.load() if self._engine else None

    def start(self) -> None:
        """A new engine with an empty cache."""
        self._feed: IndexFeed = index_feed(
            page_size=self.spec.page_size, blocks=self._blocks, namespace=self._namespace
        )
        cache = self._parts.cache(
            capacity_tokens=self.spec.tokens,
            page_size=self.spec.page_size,
            policy=self._parts.eviction(self.worker, self.spec, random.Random(self._rng.getrandbits(64))),
            hasher=self._feed.hasher,
            changes=self._feed.sink,
        )
        self._engine = EngineModel(
            times=worker_class(self.spec.worker_class).times,
            cache=cache,
            options=self.spec.scheduler,
            answer_token=self._answer_token,
        )
        self._stepping = False

    def kill(self) -> Sequence[str]:
        """The engine dies. Returns: the requests that it served or kept waiting, in order of submission."""
        if self._engine is None:
            return []
        self._busy_us_before += self._engine.load().total_busy_us
        self._engine = None
        self.incarnation += 1
        lost, self._served = list(self._served), set()
        return sorted(lost)

    def submit(self, request: EngineRequest) -> None:
        """Hands a request to the engine. Raises: RequestTooLong; RuntimeError if there is no engine."""
        if self._engine is None:
            raise RuntimeError(f"{self.worker} has no engine to serve {request.request_id}")
        self._engine.submit(request, now_ms=self._clock.now_ms)
        self._served.add(request.request_id)
        if not self._stepping:
            # Requests that arrive at the same moment share the first batch.
            self._stepping = True
            self._clock.after(0.0, self._stepper(self.incarnation))

    def _stepper(self, incarnation: int) -> Callable[[], None]:
        return lambda: self._wake(incarnation)

    def _wake(self, incarnation: int) -> None:
        if incarnation != self.incarnation or self._engine is None:
            return
        self._start_step(self._engine)
        if not self._stepping:
            self._tell(StepResult(tokens=[], deltas=self._feed.drain()))

    def _start_step(self, engine: EngineModel) -> None:
        step = engine.start_step(now_ms=self._clock.now_ms)
        self._stepping = step is not None
        if step is not None:
            incarnation = self.incarnation
            self._clock.after(step.duration_ms * self._slowness(), lambda: self._finish(step, incarnation))

    def _finish(self, step: Step, incarnation: int) -> None:
        if incarnation != self.incarnation or self._engine is None:
            return
        tokens = self._engine.finish_step(step, now_ms=self._clock.now_ms)
        self._served.difference_update(token.request_id for token in tokens if token.finished)
        # An engine publishes at the end of a step; what the begin of the next one evicts is told with that one's end.
        result = StepResult(tokens=tokens, deltas=self._feed.drain())
        self._start_step(self._engine)
        self._tell(result)

    def _tell(self, result: StepResult) -> None:
        if result.tokens or result.deltas:
            self._on_step(self, result)

    def _slowness(self) -> float:
        return self.spec.slow_factor if self._clock.now_ms >= self.spec.slow_from_ms else 1.0
