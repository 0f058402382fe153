"""One data-parallel rank: an engine model with its cache, and all that the outside hears of it."""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import zmq

from kvrouting_core.eviction import GuardedEviction, RandomizedLeafTokens, make_policy
from kvrouting_core.radix_cache import RadixCache
from kvrouting_core.radix_changes import StoredPages
from kvrouting_core.routing.events import SchedulerOptions
from kvrouting_core.service_time import StepTimes
from kvrouting_simulator.engine_model import EngineLoad, EngineModel, EngineRequest, TokenProduced
from kvrouting_simulator.engine_process.engine_clock import EngineClock
from kvrouting_simulator.engine_process.event_faults import EventFaults
from kvrouting_simulator.engine_process.event_publisher import EventPublisher
from kvrouting_simulator.engine_process.generation import Answer, Generation, Prompt, RequestIdInUseError
from kvrouting_simulator.engine_process.kv_events import EventBatch, EventRecorder, PageHasher
from kvrouting_simulator.engine_process.load_reports import HEARTBEAT_S, LoadPublisher, LoadStat
from kvrouting_simulator.engine_process.state_socket import StateSocket
from kvrouting_simulator.engine_process.step_loop import StepLog, StepLoop

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankOptions:
    """What all ranks of an engine have in common. seed: of the eviction policy's coins, per rank seed + rank."""

    times: StepTimes
    capacity_tokens: int
    page_size: int
    eviction: str
    seed: int
    scheduler: SchedulerOptions


@dataclass(frozen=True, kw_only=True, slots=True)
class RankOutlets:
    """Where a rank is heard; None: it keeps silent there. events_port, event_faults: those of `events`."""

    events: EventPublisher | None
    events_port: int | None
    event_faults: EventFaults
    load: LoadPublisher | None
    state: zmq.Socket[bytes] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Published:
    """The cache as of the last published batch."""

    sequence: int
    pages: int
    digest: int


class Rank:
    """One engine model in real time. Everything runs on the event loop."""

    def __init__(
        self,
        *,
        number: int,
        options: RankOptions,
        outlets: RankOutlets,
        clock: EngineClock,
        monotonic_s: Callable[[], float],
        on_tokens: Callable[[int], None],
        on_step: Callable[[float], None],
        on_end: Callable[[Generation], None],
    ) -> None:
        """on_tokens: hears how many tokens a step gave, before anybody gets them; on_step: how late its end was seen,
        in s; on_end: of each answer that ended."""
        self.number = number
        self.log = StepLog(on_step)
        self.loop = StepLoop(clock=clock, outlet=self, log=self.log)
        self._options = options
        self._outlets = outlets
        self._clock = clock
        self._monotonic_s = monotonic_s
        self._on_tokens = on_tokens
        self._on_end = on_end
        self._generations: dict[str, Generation] = {}  # by the model's id: a client may use its own twice in a row
        self._submitted = 0
        self._state_socket = None if outlets.state is None else StateSocket(outlets.state, self)
        self._steps: asyncio.Task[None] | None = None
        self._begin()

    def _begin(self) -> None:
        began_s = self._monotonic_s()
        options = self._options
        self.epoch = secrets.token_hex(8)
        self._recorder = EventRecorder()
        self._policy = make_policy(options.eviction, random.Random(options.seed + self.number))
        self._cache = RadixCache(
            capacity_tokens=options.capacity_tokens,
            policy=self._policy,
            page_size=options.page_size,
            hasher=PageHasher(options.page_size),
            changes=self._recorder,
        )
        self._model = EngineModel(
            times=options.times, cache=self._cache, options=options.scheduler, answer_token=self._answer_token
        )
        self._published = _Published(sequence=0, pages=0, digest=0)
        self.startup_time: Mapping[str, float] = {"scheduler_init": self._monotonic_s() - began_s}
        """Measured durations in s by phase, as in /server_info: in effect never twice the same."""

    # ---- life ----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Steps, reports load and answers the state socket until cancelled."""
        if self._outlets.events is not None:
            self._outlets.events.start()
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._step_forever())
                if self._outlets.load is not None:
                    tasks.create_task(self._beat(self._outlets.load))
                if self._state_socket is not None:
                    tasks.create_task(self._state_socket.run())
        finally:
            if self._outlets.load is not None:
                self._outlets.load.stop()
            if self._outlets.events is not None:
                self._outlets.events.stop()

    async def _step_forever(self) -> None:
        task = asyncio.current_task()
        while True:
            self._steps = asyncio.create_task(self.loop.run(self._model))
            try:
                await self._steps
            except asyncio.CancelledError:
                if task is not None and task.cancelling():
                    raise
                # A restart ended the loop of the model that is no more.

    async def _beat(self, publisher: LoadPublisher) -> None:
        while True:
            publisher.beat(self._load_stat())
            await asyncio.sleep(HEARTBEAT_S)

    def restart(self) -> None:
        """Plays a process that died and came back on the same ports: new epoch, empty cache, numbers from 0.

        Whoever waits for an answer gets EngineGoneError.
        """
        lost, self._generations = self._generations, {}
        for generation in lost.values():
            generation.lose()
        if self._outlets.events is not None:
            self._outlets.events.restart()
        self._begin()
        if self._steps is not None:
            self._steps.cancel()

    # ---- requests ------------------------------------------------------------------------------------------------

    def submit(self, request_id: str, prompt: Prompt, answer: Answer) -> Generation:
        """Queues a prompt.

        Raises: RequestIdInUseError; RequestTooLong if prompt and answer exceed the cache.
        """
        if any(g.request_id == request_id for g in self._generations.values()):
            raise RequestIdInUseError(f"Duplicate request id detected: {request_id}")
        self._submitted += 1
        key = str(self._submitted)
        request = EngineRequest(
            request_id=key,
            prompt=prompt.tokens,
            output_tokens=len(answer.tokens),
            namespace=prompt.namespace,
        )
        self._model.submit(request, now_ms=self.loop.model_ms)
        generation = Generation(
            key=key,
            request_id=request_id,
            prompt_tokens=len(prompt.tokens),
            answer=answer,
            submitted_s=self._monotonic_s(),
        )
        self._generations[key] = generation
        self.loop.wake()
        return generation

    def abort(self, generation: Generation) -> None:
        """Ends a generation and frees its slots; nothing happens if it has ended."""
        if self._generations.get(generation.key) is not generation:
            return
        del self._generations[generation.key]
        self._model.abort(generation.key)
        generation.end("abort", now_s=self._monotonic_s())
        self._on_end(generation)
        self.loop.wake()

    def abort_all(self, prefix: str) -> None:
        """Aborts every generation whose id starts so, as SGLang's /abort_request does; "" stands for all."""
        for generation in list(self._generations.values()):
            if generation.request_id.startswith(prefix):
                self.abort(generation)

    def flush(self) -> bool:
        """Empties the cache; False, and nothing happens, while requests run or wait."""
        flushed = self._model.flush()
        self.loop.wake()
        return flushed

    # ---- figures -------------------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Whether nothing runs or waits."""
        return self._model.idle

    @property
    def page_size(self) -> int:
        """Tokens per page of the cache."""
        return self._options.page_size

    @property
    def evicted_tokens(self) -> int:
        """Tokens evicted since the start."""
        return self._recorder.removed_pages * self._options.page_size

    @property
    def busy_s(self) -> float:
        """Real time spent in steps."""
        return self.log.busy_ms / 1000 / self._clock.speed

    @property
    def lost_s(self) -> float:
        """Real time lost because the process stood still."""
        return self.log.lost_ms / 1000 / self._clock.speed

    @property
    def event_batches(self) -> int:
        """Event batches since the epoch began."""
        return self._published.sequence

    @property
    def blocked_batches(self) -> int:
        """Event batches that held the scheduler up because the queue was full."""
        return self._outlets.events.blocked_batches if self._outlets.events else 0

    @property
    def event_faults(self) -> EventFaults:
        """What may be made to go wrong with the events."""
        return self._outlets.event_faults

    def silence_state(self, silent: bool) -> None:
        """Whether the state socket keeps its answers to itself."""
        if self._state_socket is not None:
            self._state_socket.silent = silent

    def load(self) -> EngineLoad:
        """The model's own report, in engine time."""
        return self._model.load()

    def load_snapshot(self) -> Mapping[str, Any]:
        """The rank's part of SGLang's /v1/loads."""
        stat, load = self._load_stat(), self._model.load()
        hits = load.total_cached_tokens / load.total_prompt_tokens if load.total_prompt_tokens else 0.0
        return {
            "timestamp": time.time(),
            "dp_rank": self.number,
            "num_running_reqs": stat.num_running_reqs,
            "num_waiting_reqs": stat.num_waiting_reqs,
            "num_waiting_uncached_tokens": stat.num_waiting_uncached_tokens,
            "num_used_tokens": stat.num_tokens,
            "num_total_tokens": stat.num_total_tokens,
            "num_active_tokens": stat.num_total_tokens,
            "max_total_num_tokens": stat.max_total_num_tokens,
            "max_running_requests": stat.max_running_requests,
            "token_usage": stat.num_tokens / stat.max_total_num_tokens,
            "cache_hit_rate": hits,
            "total_prefill_uncached_tokens": stat.total_prefill_uncached_tokens,
            "total_prefill_busy_us": stat.total_prefill_busy_us,
        }

    # ---- what the step loop hands out ----------------------------------------------------------------------------

    def tokens(self, produced: Sequence[TokenProduced]) -> None:
        """Passes tokens on to their generations."""
        self._on_tokens(len(produced))
        now_s = self._monotonic_s()
        for token in produced:
            generation = self._generations.get(token.request_id)
            if generation is None:
                continue
            generation.add(token.token, cached_tokens=token.cached_tokens, now_s=now_s, last=token.finished)
            if token.finished:
                del self._generations[token.request_id]
                self._on_end(generation)

    def started(self) -> None:
        """A step began: requests may have left the queue."""
        if self._outlets.load is not None:
            self._outlets.load.offer(self._load_stat())

    def settled(self) -> None:
        """A step ended or there is nothing to do: all changes since the last time are one batch."""
        events = self._recorder.take()
        if events:
            self._published = _Published(
                sequence=self._published.sequence + 1, pages=self._cache.live_pages, digest=self._cache.digest or 0
            )
            if self._outlets.events is not None:
                batch = EventBatch(ts=time.time(), events=events, attn_dp_rank=self.number)
                self._outlets.events.publish(batch)
        if self._outlets.load is not None:
            self._outlets.load.offer(self._load_stat())

    def _load_stat(self) -> LoadStat:
        load = self._model.load()
        return LoadStat(
            num_running_reqs=load.running_requests,
            num_waiting_reqs=load.waiting_requests,
            num_tokens=load.used_tokens,
            max_total_num_tokens=load.max_total_tokens,
            attn_dp_rank=self.number,
            num_waiting_uncached_tokens=load.waiting_uncached_tokens,
            num_total_tokens=load.used_tokens + load.waiting_uncached_tokens,
            max_running_requests=load.max_running_requests,
            total_prefill_uncached_tokens=load.total_prefill_uncached_tokens,
            total_prefill_busy_us=round(load.total_prefill_busy_us / self._clock.speed),
        )

    def _answer_token(self, request: EngineRequest, index: int) -> int:
        generation = self._generations.get(request.request_id)
        return 0 if generation is None else generation.answer.tokens[index]

    # ---- state socket --------------------------------------------------------------------------------------------

    def state(self) -> Mapping[str, Any]:
        """Epoch and digest as of the last batch, see docs/state-socket.md."""
        return {
            "epoch": self.epoch,
            "dp_rank": self.number,
            "page_size": self._options.page_size,
            "sequence": self._published.sequence,
            "pages": self._published.pages,
            "digest": self._published.digest,
            "capacity_tokens": self._cache.capacity_tokens,
            "cached_tokens": self._cache.used_tokens,
            "events_port": self._outlets.events_port,
            "eviction": self._eviction(),
        }

    def _eviction(self) -> Mapping[str, Any]:
        live: dict[str, Any] = {
            "policy": self._options.eviction,
            "live": True,
            "seed": self._options.seed + self.number,
        }
        if isinstance(self._policy, RandomizedLeafTokens):
            live["phase"] = self._policy.phase
            live["marked_tokens"] = self._policy.marked_pages * self._options.page_size
        if isinstance(self._policy, GuardedEviction):
            live.update(self._policy.figures())
        return {**live, "evicted_tokens": self.evicted_tokens}

    def snapshot(self) -> tuple[str, int, Sequence[StoredPages]]:
        """Epoch, number of the next batch and the whole tree, node by node.

        What changed since the last batch is in the snapshot and again in the next batch: no harm, the last event
        of a page decides.
        """
        return self.epoch, self._published.sequence, list(self._cache.snapshot())
