"""Which message may be applied: fences by epoch and sequence number.

Messages come late, twice, not at all, or from a process that no longer exists. A fence sees their numbers before
anybody sees their content, and gives a decision; only what it lets through in order changes a cache view.

`BatchOrder` guards one engine's event batches, which carry a sequence number and nothing else. `SyncOrder` guards
the messages of all workers at a router, which carry worker, epoch and sequence number and come on streams that
the router numbers itself.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from kvrouting_core.identity import WorkerId


class FencingDecision(enum.Enum):
    """What to do with a message."""

    APPLY = "apply"  # it is the next one
    DUPLICATE = "duplicate"  # its content is already applied: ignore it
    GAP = "gap"  # messages before it are missing: replay them or take a snapshot; ignore it until then
    RESTART = "restart"  # another process speaks: what is known of the former is void, take a snapshot
    STALE = "stale"  # it is from a stream, an epoch or a worker that is gone: ignore it


@dataclass(frozen=True, kw_only=True, slots=True)
class FencingResult:
    """A decision with its reason.

    missing: with GAP, the sequence numbers to replay; None if a replay cannot help, only a snapshot.
    """

    decision: FencingDecision
    reason: str
    missing: range | None = None


def _result_in_sequence(expected: int, sequence: int) -> FencingResult:
    """The decision where numbers alone decide."""
    if sequence == expected:
        return _NEXT
    if sequence < expected:
        return FencingResult(decision=FencingDecision.DUPLICATE, reason=f"{sequence} is covered: {expected} is next")
    return FencingResult(
        decision=FencingDecision.GAP,
        reason=f"{sequence} came where {expected} is next",
        missing=range(expected, sequence),
    )


_NEXT = FencingResult(decision=FencingDecision.APPLY, reason="next in sequence")


class _Remembered:
    """A set of bounded size that forgets its oldest members."""

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise ValueError(f"remembered {limit} must be at least 1")
        self._limit = limit
        self._members: dict[tuple[WorkerId | None, str | None], None] = {}

    def add(self, worker: WorkerId | None, epoch: str | None) -> None:
        self._members.pop((worker, epoch), None)
        self._members[worker, epoch] = None
        if len(self._members) > self._limit:
            del self._members[next(iter(self._members))]

    def discard(self, worker: WorkerId | None, epoch: str | None) -> None:
        self._members.pop((worker, epoch), None)

    def __contains__(self, member: tuple[WorkerId | None, str | None]) -> bool:
        return member in self._members

    def __len__(self) -> int:
        return len(self._members)


class BatchOrder:
    """The order of one engine's event batches.

    The stream names no process: a restarted engine counts from 0 again. So a number that goes back on the live
    stream means a restart, and the epoch, which is learned beside the stream, shows a restart that the numbers hide.
    After a RESTART nothing is let through until `start`.
    """

    def __init__(self, *, remembered: int = 64) -> None:
        """remembered: former epochs whose late answers are recognised."""
        self._dead = _Remembered(remembered)
        self._epoch: str | None = None
        self._next: int | None = None
        self._last_live: int | None = None
        self._desync_reason: str | None = "not started"

    @property
    def epoch(self) -> str | None:
        """The process that is listened to; None: not learned."""
        return self._epoch

    @property
    def next_sequence(self) -> int | None:
        """The number of the next batch to apply; None: whatever comes first."""
        return self._next

    def start(self, *, epoch: str | None, next_sequence: int | None) -> None:
        """Listen to this process from here on: the state before `next_sequence` is known from elsewhere.

        epoch: None if the engine does not tell. next_sequence: None to begin with whatever batch comes first, for
        an engine that gives no snapshot. Raises: ValueError for an epoch that was given up or a negative number.
        """
        if epoch is not None and (None, epoch) in self._dead:
            raise ValueError(f"epoch {epoch!r} was given up for a newer one")
        if next_sequence is not None and next_sequence < 0:
            raise ValueError(f"next_sequence {next_sequence} must be 0 or more")
        self._bury_unless(epoch)
        self._epoch, self._next, self._last_live, self._desync_reason = epoch, next_sequence, None, None

    def learn_epoch(self, epoch: str) -> FencingResult:
        """The engine, asked beside the stream, says which process it is.

        APPLY: the one listened to. RESTART: another one. STALE: the late answer of a former one.
        """
        if (None, epoch) in self._dead:
            return FencingResult(decision=FencingDecision.STALE, reason=f"epoch {epoch!r} was given up for a newer one")
        if self._epoch is None and self._desync_reason is None:
            self._epoch = epoch
        if epoch == self._epoch and self._desync_reason is None:
            return FencingResult(decision=FencingDecision.APPLY, reason="epoch unchanged")
        if epoch != self._epoch:
            self._desync_reason = f"epoch {epoch!r} follows {self._epoch!r}"
        return FencingResult(decision=FencingDecision.RESTART, reason=self._desync_reason or "epoch changed")

    def judge(self, sequence: int, *, replayed: bool = False) -> FencingResult:
        """May this batch be applied now? APPLY advances the order.

        replayed: it was asked for, and is not from the live stream.
        """
        if not replayed and self._last_live is not None and sequence <= self._last_live:
            self._desync_reason = f"the live stream went back from {self._last_live} to {sequence}"
        if self._desync_reason is not None:
            return FencingResult(decision=FencingDecision.RESTART, reason=self._desync_reason)
        if not replayed:
            self._last_live = sequence
        result = _result_in_sequence(sequence if self._next is None else self._next, sequence)
        if result.decision is FencingDecision.APPLY:
            self._next = sequence + 1
        return result

    def _bury_unless(self, epoch: str | None) -> None:
        if self._epoch is not None and self._epoch != epoch:
            self._dead.add(None, self._epoch)


@dataclass(frozen=True, kw_only=True, slots=True)
class HandshakeResult:
    """The answer to a Hello.

    decision: APPLY: a first contact, or the known process again; RESTART: a new process of a known worker, its former
    view is void; STALE: refused. stream: the number under which this stream's messages are judged; None if refused.
    """

    decision: FencingDecision
    reason: str
    stream: int | None


@dataclass(slots=True)
class _Standing:
    stream: int
    epoch: str
    next_sequence: int | None = None  # None: no snapshot on this stream yet


class SyncOrder:
    """The order of sync messages from all workers at one router.

    A worker has one current stream, the one of its latest accepted Hello; everything on an older one is stale. An
    epoch that gave way to another is dead, and so is a worker that has left for good: a late Hello revives neither.
    An epoch never seen before counts as newer than those seen, because a sidecar opens its streams in the order of
    its engine's processes. Tombstones are bounded; a message without a current stream is stale even when its tombstone
    is forgotten, only a Hello needs it.
    """

    def __init__(self, *, remembered: int = 4096) -> None:
        """remembered: tombstones kept, of dead epochs and of workers that left."""
        self._tombstones = _Remembered(remembered)
        self._away: dict[WorkerId, str] = {}
        self._away_limit = remembered
        self._standings: dict[WorkerId, _Standing] = {}
        self._streams_opened = 0

    def hello(self, worker: WorkerId, epoch: str) -> HandshakeResult:
        """A stream opens. An accepted one supersedes the worker's former stream; deltas wait for its snapshot.

        Raises: ValueError for an empty epoch.
        """
        if not epoch:
            raise ValueError(f"worker {worker} sent an empty epoch: each engine process needs one of its own")
        if (worker, None) in self._tombstones:
            reason = f"worker {worker} left for good: whatever comes in its place needs a pod uid of its own"
            return HandshakeResult(decision=FencingDecision.STALE, reason=reason, stream=None)
        if (worker, epoch) in self._tombstones:
            reason = (
                f"epoch {epoch!r} of {worker} gave way to another engine process: if both run, their sidecars were"
                " given the same pod uid"
            )
            return HandshakeResult(decision=FencingDecision.STALE, reason=reason, stream=None)
        former = self._former_epoch(worker)
        self._streams_opened += 1
        self._away.pop(worker, None)
        self._standings[worker] = _Standing(stream=self._streams_opened, epoch=epoch)
        if former is None or former == epoch:
            reason = "first contact" if former is None else "the same process again"
            return HandshakeResult(decision=FencingDecision.APPLY, reason=reason, stream=self._streams_opened)
        self._tombstones.add(worker, former)
        return HandshakeResult(
            decision=FencingDecision.RESTART, reason=f"epoch {epoch!r} follows {former!r}", stream=self._streams_opened
        )

    def judge(self, worker: WorkerId, *, stream: int, epoch: str, sequence: int) -> FencingResult:
        """May this delta be applied now? APPLY advances the order. GAP without `missing`: no snapshot yet."""
        standing = self._standings.get(worker)
        if standing is None or (standing.stream, standing.epoch) != (stream, epoch):
            return self._foreign(worker, standing, stream, epoch)
        if standing.next_sequence is None:
            return FencingResult(decision=FencingDecision.GAP, reason="no snapshot on this stream yet")
        result = _result_in_sequence(standing.next_sequence, sequence)
        if result.decision is FencingDecision.APPLY:
            standing.next_sequence += 1
        return result

    def judge_snapshot(self, worker: WorkerId, *, stream: int, epoch: str, next_sequence: int | None) -> FencingResult:
        """May this chunk of a snapshot be used? APPLY or STALE, or RESTART for an epoch that said no Hello.

        next_sequence: in the last chunk, the number of the next delta: the order goes on from there. None: not the
        last chunk, and the order stays. A last chunk from before deltas that were applied is STALE.
        """
        standing = self._standings.get(worker)
        if standing is None or (standing.stream, standing.epoch) != (stream, epoch):
            return self._foreign(worker, standing, stream, epoch)
        if next_sequence is not None:
            if next_sequence < (standing.next_sequence or 0):
                return FencingResult(
                    decision=FencingDecision.STALE,
                    reason=f"snapshot before {next_sequence}, and {standing.next_sequence} is next",
                )
            standing.next_sequence = next_sequence
        return FencingResult(decision=FencingDecision.APPLY, reason="snapshot of the current stream")

    def judge_position(self, worker: WorkerId, *, stream: int, epoch: str, next_sequence: int) -> FencingResult:
        """Does a heartbeat's count and digest describe the present view? Changes nothing.

        APPLY: yes. GAP: deltas before it are missing. DUPLICATE: it describes an earlier view. STALE, RESTART: as
        for a delta.
        """
        standing = self._standings.get(worker)
        if standing is None or (standing.stream, standing.epoch) != (stream, epoch):
            return self._foreign(worker, standing, stream, epoch)
        if standing.next_sequence is None:
            return FencingResult(decision=FencingDecision.GAP, reason="no snapshot on this stream yet")
        return _result_in_sequence(standing.next_sequence, next_sequence)

    def leave(self, worker: WorkerId, *, for_good: bool) -> None:
        """The worker is gone: fence what is still under way from it.

        for_good: its pod is drained or deleted and no Hello may bring it back. Otherwise (silence, a broken
        stream) a new Hello of the same or a new process is welcome.
        """
        standing = self._standings.pop(worker, None)
        if for_good:
            self._away.pop(worker, None)
            self._tombstones.add(worker, None)
        elif standing is not None:
            self._away[worker] = standing.epoch
            if len(self._away) > self._away_limit:
                del self._away[next(iter(self._away))]

    def remembered(self) -> int:
        """Tombstones and absent workers in memory."""
        return len(self._tombstones) + len(self._away)

    def _former_epoch(self, worker: WorkerId) -> str | None:
        standing = self._standings.get(worker)
        return standing.epoch if standing else self._away.get(worker)

    def _foreign(self, worker: WorkerId, standing: _Standing | None, stream: int, epoch: str) -> FencingResult:
        """A message that is not from the current stream and epoch of its worker."""
        if standing is None:
            return FencingResult(decision=FencingDecision.STALE, reason=f"worker {worker} has no open stream")
        if standing.stream != stream:
            return FencingResult(
                decision=FencingDecision.STALE, reason=f"stream {stream} gave way to {standing.stream}"
            )
        if (worker, epoch) in self._tombstones:
            return FencingResult(
                decision=FencingDecision.STALE, reason=f"epoch {epoch!r} gave way to {standing.epoch!r}"
            )
        return FencingResult(
            decision=FencingDecision.RESTART, reason=f"epoch {epoch!r} on the stream of {standing.epoch!r}"
        )
