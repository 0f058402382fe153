"""The mirror of one rank and how far it may be trusted: a state machine without I/O.

Batches, answers of the state socket, breaks of the stream go in; out come deltas for the listener and, as `need`, the
one question that must be put to the engine before batches are of use again. Whoever drives it puts the question and
hands in the answer; until then it hands in no batch.

`exact`: the mirror began with a snapshot of the engine and every batch since was applied. The engine's own count and
digest are compared at equal sequence numbers. `partial`: an engine without a state socket. The mirror holds the
chains whose every block was seen since the last doubt, which is a subset of the cache.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from kvrouting_core.blocks import ChainHasher
from kvrouting_core.deltas import Delta, Extend
from kvrouting_core.event_order import BatchOrder, FencingDecision
from kvrouting_core.tree_mirror import MirrorDesynchronizedError, TreeMirror
from kvrouting_sidecar.mirror_terms import (
    EventSource,
    MirrorCounts,
    MirrorListener,
    Need,
    NeedIdentity,
    NeedReplay,
    NeedSnapshot,
    Source,
)
from kvrouting_sidecar.verification import PositionHistory, Verification
from kvrouting_sidecar.wire_events import BlockRemoved, BlockStored, EngineState, Event

_GPU_MEDIA = (None, "GPU")
# A subset of the cache cannot be larger than the cache; an engine may count a few pages more than it calls capacity.
_CAPACITY_SLACK = 1.05
_REMEMBERED_EPOCHS = 64


class RankMirror:
    """One rank's tree in routing blocks."""

    def __init__(
        self, hasher: ChainHasher, *, model: str, capacity_tokens: int, page_size_tokens: int, listener: MirrorListener
    ) -> None:
        self._hasher = hasher
        self._model = model
        self._limit_pages = int(capacity_tokens / page_size_tokens * _CAPACITY_SLACK) if capacity_tokens else None
        self._listener = listener
        self._order = BatchOrder()
        self._tree = TreeMirror(hasher, model=model, exact=False)
        self._tree_is_exact = False
        self._epoch: str | None = None
        self._engine_epoch: str | None = None
        self._fingerprint: str | None = None
        self._state_answers = False
        self._state_trouble = "the engine's state socket does not answer"
        self._told_epochs: deque[str] = deque(maxlen=_REMEMBERED_EPOCHS)
        self._settled = False
        self._settles_at: int | None = None
        self._gap: range | None = None
        self._desynchronized = False
        self._history = PositionHistory()
        self.verification = Verification()
        self.counts = MirrorCounts()
        self.need: Need | None = NeedIdentity("not started")
        self.desync_reason = "not started"

    # --- what may be said of it ---

    @property
    def epoch(self) -> str | None:
        """The name of the engine process behind the mirror, never used twice; None: not known yet.

        It is the engine's own epoch where it has one, with a suffix if another name was told meanwhile.
        """
        return self._epoch

    @property
    def source(self) -> Source:
        """EXACT only while the engine proves it."""
        return Source.EXACT if self._tree_is_exact and self._state_answers else Source.PARTIAL

    @property
    def in_sync(self) -> bool:
        """It may be shown: no snapshot is wanted or being taken in."""
        return self._settled and not self._desynchronized

    @property
    def next_sequence(self) -> int | None:
        """The number of the next batch; None: whatever comes first."""
        return self._order.next_sequence

    @property
    def blocks(self) -> int:
        return self._tree.blocks

    @property
    def block_digest(self) -> int:
        return self._tree.block_digest

    @property
    def pages(self) -> int:
        return self._tree.pages

    def snapshot(self) -> Iterator[Extend]:
        """All blocks present, parents first."""
        return self._tree.snapshot()

    def reason(self) -> str:
        """Why the mirror is not exact or not in sync; empty when all is well."""
        if not self.in_sync:
            return self.desync_reason
        if self.source is Source.EXACT:
            return ""
        return f"{self._state_trouble}; the mirror is a subset of the engine's cache"

    # --- the live stream and the replay ---

    def offer(self, sequence: int, events: Iterable[Event], *, replayed: bool = False) -> bool:
        """A batch. Returns: whether it is dealt with; False: it must be offered again when the need is met."""
        result = self._order.judge(sequence, replayed=replayed)
        if result.decision is FencingDecision.APPLY:
            self._apply(events)
            return True
        if result.decision is FencingDecision.DUPLICATE:
            self.counts.duplicates += 1
            return True
        if result.decision is FencingDecision.GAP:
            return self._meet_gap(sequence, events, result.missing, replayed=replayed)
        self._ask_for_source(result.reason)
        return False

    def undecodable(self, sequence: int, reason: str, *, replayed: bool = False) -> bool:
        """A batch whose content cannot be read: what it changed is lost. Returns: as `offer`."""
        if not self.offer(sequence, (), replayed=replayed):
            return False
        self.counts.undecodable += 1
        self._desync_reason(reason)
        return True

    def batches_dropped(self) -> None:
        """Batches are missing here."""
        if self._order.next_sequence is not None:
            self._ask_replay("the event queue was full")

    def connection_changed(self) -> None:
        """What follows may be missing batches, or come from another process."""
        self._ask_for_source("a new connection to the engine's events")

    def _ask_for_source(self, reason: str) -> None:
        self.need = NeedIdentity(reason)
        if self._epoch is not None and not self._tree_is_exact:
            # Without a state socket it takes seconds to learn whether the process is the same, and nothing proves
            # the mirror meanwhile: a subset of what may be gone is none.
            self._empty(exact=False)
            self._listener.replaced()

    def _meet_gap(self, sequence: int, events: Iterable[Event], missing: range | None, *, replayed: bool) -> bool:
        if not replayed:
            self.counts.gaps += 1
            self._gap = missing
            self.need = NeedReplay(self._order.next_sequence or 0, f"batch {sequence} came early")
            return False
        # The engine no longer has what is missing.
        self._desync_reason(f"batches {missing} can no longer be replayed")
        if self._tree_is_exact:
            return False
        return self.offer(sequence, events, replayed=True)

    def _ask_replay(self, reason: str) -> None:
        self.need = NeedReplay(self._order.next_sequence or 0, reason)

    def replay_ended(self, *, batches: int, failure: str | None) -> None:
        """Everything that the engine could replay was offered, or it failed."""
        gap, self._gap = self._gap, None
        if batches:
            self.counts.replays += 1
            self.counts.replayed_batches += batches
        if not isinstance(self.need, NeedReplay):
            return
        self.need = None
        reached = self._order.next_sequence
        if gap is not None and reached is not None and reached < gap.stop:
            self._desync_reason(failure or f"batches {range(reached, gap.stop)} can no longer be replayed")
        else:
            self._settle_if_reached()

    # --- who speaks ---

    def knows(self, event_source: EventSource) -> bool:
        """Whether it is the process behind the mirror."""
        if self._epoch is None:
            return False
        if event_source.epoch is not None:
            return event_source.epoch == self._engine_epoch
        return event_source.fingerprint is not None and event_source.fingerprint == self._fingerprint

    def identified(self, event_source: EventSource, *, fallback_epoch: str) -> None:
        """This process speaks now. fallback_epoch: the name to give to one that has no epoch."""
        known = self.knows(event_source)
        self.need = None
        self._state_answers = event_source.epoch is not None
        if event_source.fingerprint is not None or not known:
            self._fingerprint = event_source.fingerprint
        if known:
            self._carry_on()
        else:
            self._engine_epoch = event_source.epoch
            self._begin(self._unused(event_source.epoch or fallback_epoch))

    def _unused(self, epoch: str) -> str:
        """A process that was taken for another one meanwhile comes back under a new name: the old one is void."""
        if epoch not in self._told_epochs:
            self._told_epochs.append(epoch)
            return epoch
        return f"{epoch}+{self.counts.restarts}"

    def _carry_on(self) -> None:
        self._order.start(epoch=self._epoch, next_sequence=self._order.next_sequence)
        if self._state_answers and not self._tree_is_exact:
            self.need = NeedSnapshot("the state socket answers")
        elif self._tree_is_exact and (self._desynchronized or not self._settled):
            self.need = NeedSnapshot(self.desync_reason)
        else:
            self._ask_replay("after a break of the stream")

    def _begin(self, epoch: str) -> None:
        if self._epoch is not None:
            self.counts.restarts += 1
        self._epoch = epoch
        self._order.start(epoch=epoch, next_sequence=None)
        self._empty(exact=self._state_answers)
        self._settled = not self._state_answers
        self.desync_reason = "the engine's tree is not read yet"
        self._listener.new_epoch()
        if self._state_answers:
            self.need = NeedSnapshot("new engine process")
        else:
            self.need = NeedReplay(0, "new engine process")

    # --- the state socket ---

    def engine_state(self, state: EngineState) -> None:
        """An answer of the state socket."""
        if self._epoch is None or isinstance(self.need, NeedIdentity):
            return
        if state.epoch != self._engine_epoch:
            self.need = NeedIdentity(f"epoch {state.epoch!r} follows {self._epoch!r}")
            return
        self._state_answers = True
        if not self._tree_is_exact:
            self.need = NeedSnapshot("the state socket answers")
            return
        if self.need is None and not self.verification.expect(state, self._order.next_sequence):
            self._gap = range(self._order.next_sequence or 0, state.sequence)
            self.need = NeedReplay(self._gap.start, f"batches {self._gap} never came")
        self._verify()

    @property
    def state_trouble(self) -> str:
        """Why the state socket is of no use, as far as it is of none."""
        return self._state_trouble

    def state_lost(self, reason: str) -> None:
        """The state socket no longer answers. What the mirror holds stays right as long as nothing is missed."""
        self._state_answers = False
        self._state_trouble = reason
        self.verification.lost()

    # --- snapshots ---

    def snapshot_begins(self, epoch: str, position: int) -> bool:
        """The first piece came. Returns: False if it is of another process, which is asked for then."""
        if epoch != self._engine_epoch:
            self.need = NeedIdentity(f"epoch {epoch!r} follows {self._epoch!r}")
            return False
        self._empty(exact=True)
        self._tree.begin_snapshot()
        self._settled = False
        self.desync_reason = "taking in a snapshot of the engine's tree"
        self._order.start(epoch=self._epoch, next_sequence=position)
        return True

    def snapshot_piece(self, events: Iterable[BlockStored]) -> None:
        """Pages of the snapshot, in any order."""
        for event in events:
            if event.medium in _GPU_MEDIA:
                _store(self._tree, event)

    def snapshot_complete(self, state: EngineState) -> None:
        """All pieces are in. state: asked after the last one, so the mirror is consistent once it is there."""
        if state.epoch != self._engine_epoch:
            self.need = NeedIdentity(f"epoch {state.epoch!r} follows {self._epoch!r}")
            return
        self.counts.snapshots += 1
        self.need = None
        self._settles_at = state.sequence
        self.verification.expect(state, self._order.next_sequence)
        self._settle_if_reached()

    def snapshot_failed(self, reason: str) -> None:
        """The engine did not give it; without a state socket the mirror goes on as a subset."""
        self.desync_reason = reason
        if not self._state_answers:
            self.need = None
            self._desync_reason(reason)

    # --- inside ---

    def _apply(self, events: Iterable[Event]) -> None:
        self.counts.batches += 1
        told = self._settled
        try:
            for event in events:
                deltas = _applied(self._tree, event)
                if deltas and told:
                    self._listener.changed(deltas)
        except (MirrorDesynchronizedError, ValueError) as error:
            self._desync_reason(str(error))
            return
        if self._limit_pages is not None and not self._tree_is_exact and self._tree.pages > self._limit_pages:
            self._desync_reason(f"the mirror holds {self._tree.pages} pages, the engine at most {self._limit_pages}")
            return
        if self._settles_at is not None:
            self._settle_if_reached()
        if self._settled and self._tree_is_exact:
            self._history.note(self._order.next_sequence or 0, self._tree.pages, self._tree.page_digest)
            if self.verification.due_at == self._order.next_sequence:
                self._verify()

    def _settle_if_reached(self) -> None:
        if self._settles_at is None or (self._order.next_sequence or 0) < self._settles_at:
            return
        self._settles_at = None
        try:
            self._tree.end_snapshot()
        except MirrorDesynchronizedError as error:
            self._desync_reason(str(error))
            return
        self._settled = True
        self._history.note(self._order.next_sequence or 0, self._tree.pages, self._tree.page_digest)
        self._listener.replaced()
        self._verify()

    def _verify(self) -> None:
        """Compare with the engine's own count and digest, if the mirror was or is at their position."""
        if not self._settled or self.need is not None:
            return
        mismatch = self.verification.compare(self._history)
        if mismatch is not None:
            self._desync_reason(mismatch)

    def _desync_reason(self, reason: str) -> None:
        self.counts.desyncs += 1
        self.desync_reason = reason
        self._gap = None
        if self._state_answers:
            self._desynchronized = True
            self.verification.lost()
            self.need = NeedSnapshot(reason)
            return
        self.need = None
        self._empty(exact=False)
        self._order.start(epoch=self._epoch, next_sequence=None)
        self._settled = True
        self._listener.replaced()

    def _empty(self, *, exact: bool) -> None:
        self._tree = TreeMirror(self._hasher, model=self._model, exact=exact)
        self._tree_is_exact = exact
        self._desynchronized = False
        self._settles_at = None
        self._history.forget()
        self.verification.forget()


def _applied(tree: TreeMirror, event: Event) -> list[Delta]:
    if isinstance(event, BlockStored):
        return _store(tree, event) if event.medium in _GPU_MEDIA else []
    if isinstance(event, BlockRemoved):
        return tree.removed(event.block_hashes) if event.medium in _GPU_MEDIA else []
    return tree.cleared()


def _store(tree: TreeMirror, event: BlockStored) -> list[Delta]:
    return tree.stored(
        event.parent_block_hash,
        event.block_hashes,
        event.token_ids,
        page_size=event.block_size,
        lora_adapter=event.lora_adapter,
        cache_salt=event.cache_salt,
    )
