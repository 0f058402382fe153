"""What one router still has to be told: a state machine between the mirror and one stream, without I/O.

The mirror reports every change to every session. A session keeps only the *net* difference between what its router
has been sent and what the mirror holds, so a block that comes and goes while the router is slow costs nothing, and a
session never holds more than the two views together. When the difference has outgrown the mirror itself, a snapshot
is the shorter message and replaces it.

At most `window` messages are unacknowledged. Each message leaves the router with a prefix-closed set: the first delta
after a pause trims all that is to be trimmed, and blocks are added parents first, as the mirror reports them.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from kvrouting_core.deltas import Clear, Delta, Extend, Trim

_MASK = (1 << 64) - 1

Run = tuple[int, list[int]]
"""A chain: its parent (0: it starts a prompt) and its blocks, each the prefix of the next."""


class BlockView(Protocol):
    """The mirror as a session needs it."""

    @property
    def blocks(self) -> int:
        """Blocks present."""
        ...

    def snapshot(self) -> Iterable[Extend]:
        """All blocks present, parents before children, as of the moment of the call."""
        ...


class SessionError(Exception):
    """The router said something that the protocol rules out; the stream is of no use any more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotPart:
    """One piece of a snapshot. next_sequence: the number of the delta that follows the last piece."""

    first: bool
    last: bool
    next_sequence: int
    runs: list[Run]


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaPart:
    """One change of the router's view: cleared, then trimmed, then extended."""

    sequence: int
    clear: bool
    trimmed: list[int]
    extended: list[Run]


@dataclass(frozen=True, kw_only=True, slots=True)
class DeliveredView:
    """What the router holds once it has applied everything that was sent: of a snapshot, only when it is complete."""

    next_sequence: int
    blocks: int
    digest: int


@dataclass(slots=True)
class _SnapshotUnderWay:
    parents: array[int]
    blocks: array[int]
    sent: int = 0

    def take(self, count: int) -> list[Run]:
        end = min(self.sent + count, len(self.blocks))
        runs = list(_joined(zip(self.parents[self.sent : end], self.blocks[self.sent : end], strict=True)))
        self.sent = end
        return runs

    @property
    def exhausted(self) -> bool:
        return self.sent == len(self.blocks)


class Session:
    """The sequence of snapshots and deltas that keeps one router's view equal to the mirror.

    Every change of the mirror is reported in its order by `changed`, and `next_message` is asked until it has nothing
    to say. A new session owes a snapshot.
    """

    def __init__(
        self, view: BlockView, *, window_messages: int, blocks_per_message: int = 1024, floor_blocks: int = 4096
    ) -> None:
        """window_messages: how many may be unacknowledged. floor_blocks: a difference below it stays a difference.

        Raises: ValueError for a window or message size below 1.
        """
        if window_messages < 1:
            raise ValueError(f"window of {window_messages} messages: a router must accept at least 1")
        if blocks_per_message < 1:
            raise ValueError(f"blocks_per_message {blocks_per_message} must be at least 1")
        self._view = view
        self._window = window_messages
        self._blocks_per_message = blocks_per_message
        self._floor_blocks = floor_blocks
        self._added: dict[int, int] = {}  # block → parent, parents first
        self._removed: dict[int, None] = {}
        self._clear = False
        self._snapshot_due = True
        self._snapshot: _SnapshotUnderWay | None = None
        self._sequence = 0
        self._delivered_blocks = 0
        self._delivered_digest = 0
        self._sent_messages = 0
        self._acknowledged_messages = 0
        self._owed_since_s: float | None = None
        self._unacknowledged_since_s: deque[float] = deque()

    # --- what happens to the mirror ---

    def changed(self, deltas: Iterable[Delta], *, now_s: float) -> None:
        """The mirror changed, in this order."""
        if self._snapshot_due:
            return
        if self._owed_since_s is None:
            self._owed_since_s = now_s
        for delta in deltas:
            if isinstance(delta, Extend):
                self._extend(delta)
            elif isinstance(delta, Trim):
                self._trim(delta)
            else:
                self._clear_all(delta)
            if self._snapshot_due:
                return
        self._count_difference()

    def replaced(self) -> None:
        """The mirror was built anew; how it differs from the old one is not known."""
        self._make_snapshot_due()

    # --- what the router says ---

    def acknowledged(self, messages: int) -> None:
        """The router has received that many messages on this stream.

        Raises: SessionError if they are more than were sent, or fewer than it said before.
        """
        if not self._acknowledged_messages <= messages <= self._sent_messages:
            raise SessionError(
                f"the router acknowledged {messages} messages; {self._sent_messages} were sent, "
                f"{self._acknowledged_messages} acknowledged before"
            )
        for _ in range(messages - self._acknowledged_messages):
            self._unacknowledged_since_s.popleft()
        self._acknowledged_messages = messages

    def snapshot_requested(self) -> None:
        """The router doubts its view. A snapshot that is due or under way already is the answer."""
        if self._snapshot is None:
            self._make_snapshot_due()

    # --- what to send ---

    def next_message(self, *, now_s: float) -> SnapshotPart | DeltaPart | None:
        """The next message; None while the window is full or when nothing is owed."""
        if self.unacknowledged_messages >= self._window or not self.owes:
            return None
        since_s = now_s if self._owed_since_s is None else self._owed_since_s
        message = self._next_part() if self._snapshot_due or self._snapshot else self._next_delta()
        self._sent_messages += 1
        self._unacknowledged_since_s.append(since_s)
        if not self.owes:
            self._owed_since_s = None
        return message

    @property
    def owes(self) -> bool:
        """Something is left to be sent."""
        return bool(self._snapshot_due or self._snapshot or self._clear or self._added or self._removed)

    @property
    def delivered(self) -> DeliveredView:
        """The router's view after everything that was sent, for its comparison with count and digest."""
        return DeliveredView(next_sequence=self._sequence, blocks=self._delivered_blocks, digest=self._delivered_digest)

    @property
    def in_snapshot(self) -> bool:
        """A snapshot is due or under way."""
        return self._snapshot_due or self._snapshot is not None

    @property
    def sent_messages(self) -> int:
        """Snapshot parts and deltas so far."""
        return self._sent_messages

    @property
    def unacknowledged_messages(self) -> int:
        """Sent and not acknowledged yet."""
        return self._sent_messages - self._acknowledged_messages

    @property
    def window_is_full(self) -> bool:
        """Nothing may be sent until the router acknowledges."""
        return self.unacknowledged_messages >= self._window

    @property
    def pending_blocks(self) -> int:
        """Blocks of the difference and of the snapshot under way: what this session holds in memory."""
        return len(self._added) + len(self._removed) + (len(self._snapshot.blocks) if self._snapshot else 0)

    def lag_s(self, now_s: float) -> float:
        """Age of the oldest change that the router has not acknowledged; 0 if there is none."""
        oldest = self._unacknowledged_since_s[0] if self._unacknowledged_since_s else self._owed_since_s
        return 0.0 if oldest is None else max(0.0, now_s - oldest)

    # --- inside ---

    def _extend(self, delta: Extend) -> None:
        added, removed = self._added, self._removed
        parent = delta.parent or 0
        for block in delta.blocks:
            if block in removed:
                del removed[block]
            else:
                added[block] = parent
            parent = block

    def _trim(self, delta: Trim) -> None:
        added, removed = self._added, self._removed
        for block in delta.blocks:
            if added.pop(block, None) is None:
                removed[block] = None

    def _clear_all(self, _: Clear) -> None:
        if self._snapshot is not None:  # the rest of it would be sent to be thrown away
            self._make_snapshot_due()
            return
        self._added.clear()
        self._removed.clear()
        self._clear = True

    def _make_snapshot_due(self) -> None:
        self._snapshot_due = True
        self._snapshot = None
        self._clear = False
        self._added.clear()
        self._removed.clear()

    def _count_difference(self) -> None:
        # Not while one is under way: a slow router would get beginnings of snapshots for ever.
        difference = len(self._added) + len(self._removed)
        if self._snapshot is None and difference > max(self._floor_blocks, self._view.blocks):
            self._make_snapshot_due()
        if not self.owes:
            self._owed_since_s = None

    def _next_part(self) -> SnapshotPart:
        first = self._snapshot_due
        if first:
            self._snapshot_due = False
            self._snapshot = _copy_of(self._view)
        snapshot = self._snapshot
        if snapshot is None:
            raise AssertionError("no snapshot is under way")
        runs = snapshot.take(self._blocks_per_message)
        if snapshot.exhausted:
            self._snapshot = None
            self._delivered_blocks = len(snapshot.blocks)
            self._delivered_digest = sum(snapshot.blocks) & _MASK
            self._count_difference()
        return SnapshotPart(first=first, last=snapshot.exhausted, next_sequence=self._sequence, runs=runs)

    def _next_delta(self) -> DeltaPart:
        clear, self._clear = self._clear, False
        if clear:
            self._delivered_blocks = self._delivered_digest = 0
        # All at once: a part of them could leave the router with blocks whose prefix is gone.
        trimmed, self._removed = list(self._removed), {}
        added = list(islice(self._added.items(), max(0, self._blocks_per_message - len(trimmed))))
        for block, _ in added:
            del self._added[block]
        extended = list(_joined((parent, block) for block, parent in added))
        self._delivered_blocks += len(added) - len(trimmed)
        change = sum(block for block, _ in added) - sum(trimmed)
        self._delivered_digest = self._delivered_digest + change & _MASK
        self._sequence += 1
        return DeltaPart(sequence=self._sequence - 1, clear=clear, trimmed=trimmed, extended=extended)


def _copy_of(view: BlockView) -> _SnapshotUnderWay:
    parents, blocks = array("Q"), array("Q")
    for chain in view.snapshot():
        parents.append(chain.parent or 0)
        parents.extend(chain.blocks[:-1])
        blocks.extend(chain.blocks)
    return _SnapshotUnderWay(parents, blocks)


def _joined(links: Iterable[tuple[int, int]]) -> Iterator[Run]:
    """(parent, block) pairs as runs: a block that follows its parent joins its run."""
    run: list[int] = []
    for parent, block in links:
        if run and run[-1] == parent:
            run.append(block)
            continue
        run = [block]
        yield parent, run  # filled further until the next one is asked for
