"""One worker's sync stream: snapshots and deltas into the index, doubts into snapshot requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvrouting_core.event_order import FencingDecision
from kvrouting_core.identity import WorkerId
from kvrouting_router.metrics import RouterMetrics
from kvrouting_router.pool import Pool
from kvrouting_router.worker_registry import Vitals

# A doubt that no snapshot has answered by then is told again.
_ASK_AGAIN_S = 10.0


class Run(Protocol):
    """A chain: its parent (0: it starts a prompt) and its blocks."""

    @property
    def parent(self) -> int:
        """The block before the first one."""

    @property
    def blocks(self) -> Sequence[int]:
        """Each the prefix of the next."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Acknowledge:
    """Snapshot chunks and deltas received so far."""

    messages: int


@dataclass(frozen=True, kw_only=True, slots=True)
class AskSnapshot:
    """The view is in doubt."""

    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class TellInFlight:
    """Requests of this router on a draining worker."""

    requests: int


Reply = Acknowledge | AskSnapshot | TellInFlight


@dataclass(frozen=True, kw_only=True, slots=True)
class _Claim:
    """What a heartbeat says of the view that holds once `next_sequence` is next."""

    next_sequence: int
    blocks: int
    digest: int


class SyncSession:
    """The state of one stream. Its messages are handed in one after another; the index is shared."""

    def __init__(
        self,
        *,
        pool: Pool,
        worker: WorkerId,
        epoch: str,
        stream: int,
        send: Callable[[Reply], None],
        metrics: RouterMetrics,
        slice_blocks: int,
        now_s: Callable[[], float],
    ) -> None:
        self._pool = pool
        self._index = pool.index
        self._worker = worker
        self._epoch = epoch
        self._stream = stream
        self._send = send
        self._metrics = metrics
        self._added_blocks = metrics.sync_blocks.labels("added")
        self._trimmed_blocks = metrics.sync_blocks.labels("trimmed")
        self._slice_blocks = slice_blocks
        self._now_s = now_s
        self._received = 0
        self._room = slice_blocks
        self._in_snapshot = False
        self._asked_s: float | None = None
        self._claim: _Claim | None = None
        self._stop_listening: Callable[[], None] | None = None
        self.is_applying = False
        self._ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def end(self, reason: str) -> None:
        """Nothing this stream says is heard any more: the sidecar must open another one."""
        if not self._ended.done():
            self._ended.set_result(reason)

    @property
    def ended(self) -> asyncio.Future[str]:
        """Done, with the reason, when the stream must end."""
        return self._ended

    def close(self, *, reason: str) -> None:
        """The stream has ended."""
        if self._stop_listening is not None:
            self._stop_listening()
            self._stop_listening = None
        self._pool.stream_closed(self._worker, self, reason=reason)

    def request_snapshot(self, reason: str) -> None:
        """Asks for the whole tree, once per doubt; the present view keeps answering."""
        now_s = self._now_s()
        if self._asked_s is not None and now_s < self._asked_s + _ASK_AGAIN_S:
            return
        self._asked_s = now_s
        self._metrics.resyncs.labels(reason.split(":", 1)[0]).inc()
        known = self._pool.registry.get(self._worker)
        if known is not None:
            known.resyncs += 1
        self._send(AskSnapshot(reason=reason))

    async def snapshot(self, *, epoch: str, first: bool, last: bool, next_sequence: int, runs: Sequence[Run]) -> None:
        """One chunk. The last one makes the new view the present one in one step."""
        self._count_message()
        result = self._pool.order.judge_snapshot(self._worker, stream=self._stream, epoch=epoch, next_sequence=None)
        if result.decision is not FencingDecision.APPLY:
            self._metrics.fenced.inc()
            return
        if first:
            self._in_snapshot = True
            self._index.begin_snapshot(self._worker)
        elif not self._in_snapshot:
            self.request_snapshot("snapshot: a chunk came before the first one")
            return
        for run in runs:
            await self._add_in_slices(run.blocks, staged=True)
        if last:
            self._finish_snapshot(next_sequence)

    def _finish_snapshot(self, next_sequence: int) -> None:
        self._in_snapshot = False
        result = self._pool.order.judge_snapshot(
            self._worker, stream=self._stream, epoch=self._epoch, next_sequence=next_sequence
        )
        if result.decision is not FencingDecision.APPLY:
            # Another stream may have taken over while this one gave way to other work.
            self._metrics.fenced.inc()
            return
        self._index.commit_snapshot(self._worker)
        self._asked_s = None
        self._claim = None
        self._pool.last_seen(self._worker)
        self._pool.synced(self._worker)
        self._pool.view_grew(self._worker)

    async def delta(
        self, *, epoch: str, sequence: int, clear: bool, trimmed: Sequence[int], extended: Sequence[Run]
    ) -> None:
        """One change, in order or not at all."""
        self._count_message()
        result = self._pool.order.judge(self._worker, stream=self._stream, epoch=epoch, sequence=sequence)
        if result.decision is FencingDecision.GAP:
            if not self._in_snapshot:
                self.request_snapshot(f"gap: {result.reason}")
            return
        if result.decision is not FencingDecision.APPLY:
            self._metrics.fenced.inc()
            return
        self.is_applying = True
        try:
            await self._apply(clear, trimmed, extended)
        finally:
            self.is_applying = False
        self._pool.last_seen(self._worker)
        self._pool.view_grew(self._worker)
        self._compare_if_due(sequence + 1)

    async def _apply(self, clear: bool, trimmed: Sequence[int], extended: Sequence[Run]) -> None:
        if clear:
            self._index.clear(self._worker)
        for start in range(0, len(trimmed), self._slice_blocks):
            part = trimmed[start : start + self._slice_blocks]
            self._index.remove(self._worker, list(part))
            self._trimmed_blocks.inc(len(part))
            await self._give_way(len(part))
        for run in extended:
            if run.parent and not self._pool.holds(self._worker, run.parent):
                self.request_snapshot(f"unknown parent: {run.parent:#x}")
                return
            await self._add_in_slices(run.blocks, staged=False)

    async def _add_in_slices(self, blocks: Sequence[int], *, staged: bool) -> None:
        add = self._index.add_to_snapshot if staged else self._index.add
        for start in range(0, len(blocks), self._slice_blocks):
            part = list(blocks[start : start + self._slice_blocks])
            if (
                self._pool.order.judge_snapshot(
                    self._worker, stream=self._stream, epoch=self._epoch, next_sequence=None
                ).decision
                is not FencingDecision.APPLY
            ):
                return
            add(self._worker, part)
            self._added_blocks.inc(len(part))
            await self._give_way(len(part))

    async def _give_way(self, applied: int) -> None:
        """Lets other work have the loop after each slice of blocks."""
        self._room -= applied
        if self._room <= 0:
            self._room = self._slice_blocks
            await asyncio.sleep(0)

    def heartbeat(self, *, epoch: str, next_sequence: int, digest: int, vitals: Vitals) -> None:
        """Count and digest of the worker's mirror; compared as soon as the view here is as far.

        A claim that lies ahead means deltas that are still under way: it waits for them, and if they have not come
        by the next heartbeat, they are lost.
        """
        result = self._pool.order.judge_position(
            self._worker, stream=self._stream, epoch=epoch, next_sequence=next_sequence
        )
        if result.decision in (FencingDecision.STALE, FencingDecision.RESTART):
            self._metrics.fenced.inc()
            return
        self._pool.last_seen(self._worker, vitals)
        if self._in_snapshot or (result.decision is FencingDecision.GAP and result.missing is None):
            return  # the first snapshot is still to come
        if self._asked_s is not None:
            self.request_snapshot("late snapshot: the one asked for has not come")
            return
        former = self._claim
        self._claim = _Claim(next_sequence=next_sequence, blocks=vitals.blocks, digest=digest)
        if result.decision is FencingDecision.APPLY:
            self._compare_if_due(next_sequence)
        elif result.decision is FencingDecision.GAP and former is not None and self._is_ahead(former):
            self._claim = None
            self.request_snapshot(f"gap: {result.reason}")

    def _is_ahead(self, claim: _Claim) -> bool:
        result = self._pool.order.judge_position(
            self._worker, stream=self._stream, epoch=self._epoch, next_sequence=claim.next_sequence
        )
        return result.decision is FencingDecision.GAP

    def _compare_if_due(self, next_sequence: int) -> None:
        claim = self._claim
        if claim is None or claim.next_sequence != next_sequence:
            return
        self._claim = None
        count, digest = self._index.count(self._worker), self._index.digest(self._worker)
        self._metrics.digest_checks.inc()
        if (count, digest) == (claim.blocks, claim.digest):
            return
        self._metrics.drifts.inc()
        self.request_snapshot(f"digest: the worker has {claim.blocks} blocks, this router {count}")

    def draining(self, *, epoch: str, reason: str) -> None:
        """The worker leaves: it gets no new requests, and hears each change of its in-flight count."""
        if epoch != self._epoch:
            self._metrics.fenced.inc()
            return
        if self._stop_listening is None:
            self._stop_listening = self._pool.dispatcher.listen(self._worker, self._tell_in_flight)
        self._pool.drain(self._worker, reason)
        self._tell_in_flight(self._pool.dispatcher.in_flight(self._worker))

    def _tell_in_flight(self, requests: int) -> None:
        self._send(TellInFlight(requests=requests))

    def acknowledgement(self) -> Acknowledge:
        """What has been received so far."""
        return Acknowledge(messages=self._received)

    def _count_message(self) -> None:
        self._received += 1
