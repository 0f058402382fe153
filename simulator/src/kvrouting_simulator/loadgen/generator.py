"""Sends what a client says is due, on schedule, and writes down what became of it."""

from __future__ import annotations

import asyncio
import heapq
from array import array
from collections.abc import Callable
from dataclasses import dataclass

from kvrouting_core.routing.events import Outcome
from kvrouting_simulator.bounds import at_least, positive
from kvrouting_simulator.loadgen.attempt import Attempt, Sender
from kvrouting_simulator.report import RequestRecord
from kvrouting_simulator.workloads.work_item import Client, ReadyRequest


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """When to stop sending. None: no limit.

    duration_s: nothing that is due later is sent.
    resubmissions: times that a request whose answer was cut is sent again.
    """

    duration_s: float | None = None
    resubmissions: int = 0

    def __post_init__(self) -> None:
        if self.duration_s is not None:
            positive("duration_s", self.duration_s)
        at_least(0, "resubmissions", self.resubmissions)


class LoadGenerator:
    """One run: open loop, each request at its time whatever became of the others."""

    def __init__(
        self,
        *,
        client: Client,
        sender: Sender,
        monotonic_s: Callable[[], float],
        limits: Limits,
        on_record: Callable[[RequestRecord], None],
    ) -> None:
        self._client = client
        self._sender = sender
        self._monotonic_s = monotonic_s
        self._limits = limits
        self._on_record = on_record
        self._due: list[tuple[float, int, ReadyRequest]] = []
        self._pushed = 0
        self._under_way: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._start_s = 0.0
        self._stopped = False
        self.records: list[RequestRecord] = []

    async def run(self) -> None:
        """Returns when everything that may be sent has ended; `records` holds it in order of its end."""
        self._start_s = self._monotonic_s()
        for ready in self._client.begin():
            self._push(ready)
        async with asyncio.TaskGroup() as group:
            while self._due or self._under_way:
                self._changed.clear()
                wait_s = self._send_due(group)
                try:
                    async with asyncio.timeout(wait_s):
                        await self._changed.wait()
                except TimeoutError:
                    continue

    def stop(self) -> None:
        """Gives up: nothing more is sent, and what is under way ends as cancelled."""
        self._stopped = True
        self._due.clear()
        for task in self._under_way:
            task.cancel()
        self._changed.set()

    @property
    def now_ms(self) -> float:
        """Since the start of the run."""
        return (self._monotonic_s() - self._start_s) * 1000

    def _push(self, ready: ReadyRequest) -> None:
        duration_s = self._limits.duration_s
        if self._stopped or (duration_s is not None and ready.start_ms >= duration_s * 1000):
            return
        heapq.heappush(self._due, (ready.start_ms, self._pushed, ready))
        self._pushed += 1

    def _send_due(self, group: asyncio.TaskGroup) -> float | None:
        """Starts all that is due; returns the seconds until the next, None if there is none."""
        while self._due and self._due[0][0] <= self.now_ms:
            ready = heapq.heappop(self._due)[2]
            task = group.create_task(self._serve(ready))
            self._under_way.add(task)
            task.add_done_callback(self._done)
        return max(0.0, self._due[0][0] - self.now_ms) / 1000 if self._due else None

    def _done(self, task: asyncio.Task[None]) -> None:
        self._under_way.discard(task)
        self._changed.set()

    async def _serve(self, ready: ReadyRequest) -> None:
        sent_s: list[float] = []
        resubmissions = 0
        try:
            attempt = await self._sender.send(ready, on_sent=lambda: sent_s.append(self._monotonic_s()))
            while attempt.cut and resubmissions < self._limits.resubmissions:
                resubmissions += 1
                attempt = await self._sender.send(ready, on_sent=lambda: None)
        except asyncio.CancelledError:
            if not self._stopped:
                raise
            attempt = Attempt(
                outcome=Outcome.CANCELLED, end_s=self._monotonic_s(), error="interrupted: the run was stopped"
            )
        self._write_down(ready, attempt, sent_s=sent_s[0] if sent_s else None, resubmissions=resubmissions)

    def _write_down(self, ready: ReadyRequest, attempt: Attempt, *, sent_s: float | None, resubmissions: int) -> None:
        prompt_tokens = len(ready.prompt) if attempt.prompt_tokens is None else attempt.prompt_tokens
        record = RequestRecord(
            request_id=ready.request_id,
            arrival_ms=ready.start_ms,
            first_token_ms=None if attempt.first_token_s is None else self._run_ms(attempt.first_token_s),
            end_ms=self._run_ms(attempt.end_s),
            prompt_tokens=prompt_tokens,
            cached_tokens=min(attempt.cached_tokens or 0, prompt_tokens),
            output_tokens=attempt.output_tokens,
            worker=attempt.worker,
            outcome=attempt.outcome,
            error=attempt.error,
            sent_ms=None if sent_s is None else self._run_ms(sent_s),
            resubmissions=resubmissions,
        )
        self.records.append(record)
        self._on_record(record)
        self._follow_up(ready, attempt)

    def _follow_up(self, ready: ReadyRequest, attempt: Attempt) -> None:
        answer = attempt.token_ids if attempt.outcome is Outcome.COMPLETED else array("I")
        for following in self._client.ended(ready.request_id, answer, now_ms=self.now_ms):
            self._push(following)

    def _run_ms(self, moment_s: float) -> float:
        return (moment_s - self._start_s) * 1000
