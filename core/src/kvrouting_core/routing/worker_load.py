"""What the estimator holds of one worker: prior, speed, queue, running decodes, others' load, residual."""

from __future__ import annotations

import math
from typing import NamedTuple

from kvrouting_core.routing.engine_reports import (
    BusyShare,
    EngineCounters,
    MeasuredSpeed,
    OthersLoad,
    RecentPeak,
)
from kvrouting_core.routing.events import LoadReport, SchedulerOptions
from kvrouting_core.routing.queue_load import NO_DRAIN, QueueLoad, Work, surely_prefilled
from kvrouting_core.routing.residual import WorkerResidual
from kvrouting_core.service_time import StepTimes

# A request dispatched this shortly before a report may not have been in the engine's queue yet.
_ON_THE_WAY_MS = 100.0
_COST_GAIN = 0.1


class WorkerLoadState(NamedTuple):
    """The numbers of a worker load that change only when something happens there.

    a, b: ms per new token and per pair of tokens, of the prior. total_ms, oldest_ms, since_ms: as in `Drain`, those of
    `NO_DRAIN` with another kind of queue. others_until_ms: others' load counts before then. The rest: see `WorkerLoad`.
    """

    a: float
    b: float
    speed: float
    relative_speed: float
    step_ms: float
    running: int
    sequences: int
    running_limit: int
    others_until_ms: float
    total_ms: float
    oldest_ms: float
    since_ms: float


class WorkerLoad:
    """One worker as the estimator sees it. A restart or a return makes a new one.

    saturated_until_ms: it has no room until then, as whoever releases requests found; void when anything happens there.
    unwanted_until_ms: it has room and nothing that waits is to go there, as a plan found; looked at again then.
    version: rises whenever its state may have changed.
    """

    __slots__ = (
        "_context_tokens",
        "_counters",
        "_over_at_ms",
        "_over_then",
        "_own_requests",
        "_own_tokens",
        "_prior_ms_per_token",
        "_running",
        "_unstarted",
        "_unstarted_tokens",
        "a",
        "b",
        "busy",
        "chunk_tokens",
        "measured",
        "observations",
        "others",
        "queue",
        "relative_speed",
        "residual",
        "running",
        "running_limit",
        "saturated_until_ms",
        "scheduler",
        "sequences",
        "speed",
        "step_ms",
        "times",
        "unwanted_until_ms",
        "version",
    )  # fmt: skip

    def __init__(
        self, *, times: StepTimes, scheduler: SchedulerOptions, queue: QueueLoad, residual: WorkerResidual
    ) -> None:
        self.queue = queue
        self.residual = residual
        self.measured = MeasuredSpeed()
        self.busy = BusyShare()
        self.speed = 1.0  # f
        self.relative_speed = 1.0  # of mean-speed work per ms: above 1 is faster than the pool
        self.sequences = 0  # own, dispatched
        self.running = 0  # own, past their prefill
        self.observations = 0
        self.unwanted_until_ms = -math.inf
        self.version = 0
        self._counters = EngineCounters()
        self.others = OthersLoad()
        self._over_at_ms = math.inf
        self._over_then: list[str] = []
        self._own_requests = RecentPeak()
        self._own_tokens = RecentPeak()
        self._unstarted: dict[str, Work] = {}
        self._unstarted_tokens = 0
        self._running: dict[str, Work] = {}
        self._context_tokens = 0
        self.adopt(times, scheduler)

    def adopt(self, times: StepTimes, scheduler: SchedulerOptions) -> None:
        """Takes a new prior and new options; what was learned stays."""
        self.times = times
        self.a = times.prefill_ms_per_token
        self.b = times.attention_ms_per_token_pair
        self.scheduler = scheduler
        self.chunk_tokens = scheduler.chunked_prefill_tokens
        self.running_limit = scheduler.max_running_requests
        self._prior_ms_per_token = times.prefill_ms_per_token
        self._set_step()
        self.changed()

    def changed(self) -> None:
        """What was worked out from its state is void."""
        self.saturated_until_ms = -math.inf
        self.version += 1

    def state(self) -> WorkerLoadState:
        """As it is now."""
        total_ms, oldest_ms, since_ms = self.queue.drain() or NO_DRAIN
        return WorkerLoadState(
            self.a, self.b, self.speed, self.relative_speed, self.step_ms, self.running, self.sequences,
            self.running_limit, self.others.until_ms, total_ms, oldest_ms, since_ms,
        )  # fmt: skip

    def set_speed(self, speed: float) -> None:
        """It is believed to take so many times what the prior says."""
        if speed != self.speed:
            self.speed = speed
            self.changed()

    def set_relative_speed(self, relative_speed: float) -> None:
        """It is believed to be so many times as fast as the pool's mean."""
        if relative_speed != self.relative_speed:
            self.relative_speed = relative_speed
            self.changed()

    def add(self, work: Work) -> None:
        """A request was dispatched."""
        self._unstarted[work.request_id] = work
        self._unstarted_tokens += work.uncached_tokens
        self.changed()
        self.queue.add(work)
        self.sequences += work.sequences
        if work.uncached_tokens:
            cost = work.prefill_ms / work.uncached_tokens
            self._prior_ms_per_token += _COST_GAIN * (cost - self._prior_ms_per_token)
        self._record_own(work.dispatched_ms)

    def prefilled(self, request_id: str, *, now_ms: float) -> None:
        """A request is past its prefill; once told, it is told again without effect."""
        work = self._unstarted.pop(request_id, None)
        if work is None:
            return
        self.changed()
        self._unstarted_tokens -= work.uncached_tokens
        self.queue.prefilled(request_id, now_ms=now_ms)
        self._running[request_id] = work
        self.running += work.sequences
        self._context_tokens += work.context_tokens
        self._set_step()
        self._record_own(now_ms)

    def remove(self, request_id: str, *, now_ms: float) -> None:
        """A request ended."""
        self.changed()
        work = self._unstarted.pop(request_id, None)
        if work is not None:
            self._unstarted_tokens -= work.uncached_tokens
        else:
            work = self._running.pop(request_id)
            self.running -= work.sequences
            self._context_tokens -= work.context_tokens
            self._set_step()
        self.queue.remove(request_id, now_ms=now_ms)
        self.sequences -= work.sequences
        self._record_own(now_ms)

    def reported(self, report: LoadReport, *, now_ms: float) -> None:
        """Takes the engine's word; a report older than the last one says nothing."""
        if self._counters.is_stale(report):
            return
        if self._counters.went_back(report):
            self._counters = EngineCounters()
            self.measured = MeasuredSpeed()
        done = surely_prefilled(
            self._unstarted.values(),
            sent_before_ms=report.reported_ms - _ON_THE_WAY_MS,
            waiting_uncached_tokens=report.waiting_uncached_tokens,
            chunk_tokens=self.chunk_tokens,
        )
        for work in done:
            self.prefilled(work.request_id, now_ms=now_ms)
        self._end_what_must_be_over(report, now_ms=now_ms)
        self.others.replace(
            report,
            own_requests=self._own_requests.since(report.reported_ms),
            own_tokens=self._own_tokens.since(report.reported_ms),
        )
        self.version += 1
        passed = self._counters.advance(report)
        if passed is not None:
            passed_ms, busy_ms, tokens = passed
            self.busy.add(passed_ms=passed_ms, busy_ms=busy_ms)
            self.measured.add(
                passed_ms=passed_ms, busy_ms=busy_ms, tokens=tokens, prior_ms_per_token=self._prior_ms_per_token
            )

    def _end_what_must_be_over(self, report: LoadReport, *, now_ms: float) -> None:
        """By tokens alone a prompt longer than a chunk looks like the chunk in progress until its answer ends. But what
        was sent before a report is past its prefill once the engine has had the time for all that waited then, for a
        chunk, and for all of ours. This is how a long prompt whose answer is not streamed leaves the queue."""
        if report.reported_ms >= self._over_at_ms:
            for request_id in self._over_then:
                self.prefilled(request_id, now_ms=now_ms)
            self._over_at_ms = math.inf
        if self._over_at_ms == math.inf:
            sent = [w for w in self._unstarted.values() if w.dispatched_ms < report.reported_ms - _ON_THE_WAY_MS]
            if sent:
                tokens = report.waiting_uncached_tokens + self.chunk_tokens
                ahead_ms = self.times.prefill_work_ms(0, tokens) + sum(w.prefill_ms for w in sent)
                self._over_at_ms = report.reported_ms + self.speed * ahead_ms
                self._over_then = [w.request_id for w in sent]

    def others_ms(self, now_ms: float) -> float:
        """Prefill work of requests that are not ours."""
        return self.others.work_ms(now_ms=now_ms, ms_per_token=self.speed * self.a)

    def mean_work_ms(self, uncached_tokens: float) -> float:
        """s̄: prefill of a request with so many new tokens and nothing cached, at the worker's speed."""
        return self.speed * uncached_tokens * (self.a + self.b * uncached_tokens / 2)

    def slot_wait_ms(self, sequences: int, decode_ms: float) -> float:
        """Wait for a slot, where more would run than the engine lets: one of `running_limit` ends each
        decode_ms/running_limit. sequences: of the request. decode_ms: of one answer."""
        excess = self.sequences + sequences - self.running_limit
        return max(0, excess) * decode_ms / self.running_limit

    def _set_step(self) -> None:
        """A decode step with one more request than now."""
        self.step_ms = self.times.decode_ms(self.running + 1, self._context_tokens)

    def _record_own(self, now_ms: float) -> None:
        self._own_tokens.record(self._unstarted_tokens, now_ms=now_ms)
        self._own_requests.record(self.sequences, now_ms=now_ms)
