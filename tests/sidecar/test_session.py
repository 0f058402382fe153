"""A session against the obvious definition: whatever happens, the receiver reconstructs the mirror."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrouting_core.deltas import Clear, Extend, Trim
from kvrouting_sidecar.session import DeltaPart, Session, SessionError, SnapshotPart

_MASK = (1 << 64) - 1


class _TreeOfBlocks:
    """A mirror by its definition: block → parent, closed under prefixes."""

    def __init__(self) -> None:
        self.parents: dict[int, int] = {}

    @property
    def blocks(self) -> int:
        return len(self.parents)

    def snapshot(self) -> Iterable[Extend]:
        known = {0}
        waiting = dict(self.parents)
        while waiting:
            for block, parent in list(waiting.items()):
                if parent in known:
                    known.add(block)
                    del waiting[block]
                    yield Extend(parent=parent or None, blocks=(block,))

    def leaves(self) -> list[int]:
        return sorted(self.parents.keys() - set(self.parents.values()))


class _Receiver:
    """A router that believes nothing: it checks every rule of the protocol as it applies the messages."""

    def __init__(self) -> None:
        self.parents: dict[int, int] = {}
        self.staged: dict[int, int] | None = None
        self.next_sequence: int | None = None
        self.received = 0

    def apply(self, message: SnapshotPart | DeltaPart) -> None:
        self.received += 1
        if isinstance(message, SnapshotPart):
            self._apply_part(message)
        else:
            self._apply_delta(message)
        assert all(parent == 0 or parent in self.parents for parent in self.parents.values())

    def _apply_part(self, part: SnapshotPart) -> None:
        if part.first:
            self.staged = {}
        assert self.staged is not None
        _extend(self.staged, part.runs)
        if part.last:
            self.parents, self.staged = self.staged, None
            self.next_sequence = part.next_sequence

    def _apply_delta(self, delta: DeltaPart) -> None:
        assert self.staged is None
        assert delta.sequence == self.next_sequence
        self.next_sequence = delta.sequence + 1
        if delta.clear:
            self.parents.clear()
        for block in delta.trimmed:
            del self.parents[block]
        _extend(self.parents, delta.extended)


def _extend(parents: dict[int, int], runs: list[tuple[int, list[int]]]) -> None:
    for start, blocks in runs:
        parent = start
        for block in blocks:
            assert parent == 0 or parent in parents
            assert block not in parents
            parents[block] = parent
            parent = block


class _Pair:
    """One mirror, one session, one receiver."""

    def __init__(self, *, window: int, blocks_per_message: int, floor_blocks: int) -> None:
        self.tree = _TreeOfBlocks()
        self.session = Session(
            self.tree, window_messages=window, blocks_per_message=blocks_per_message, floor_blocks=floor_blocks
        )
        self.receiver = _Receiver()
        self.window = window
        self.new_block = 0
        self.removed: list[tuple[int, int]] = []

    def extend(self, at: int, count: int) -> None:
        parents = [0, *self.tree.parents]
        parent = start = parents[at % len(parents)]
        run = []
        for _ in range(count):
            self.new_block += 1
            block = self.new_block * 0x9E3779B97F4A7C15 & _MASK
            self.tree.parents[block] = parent
            run.append(block)
            parent = block
        self.session.changed([Extend(parent=start or None, blocks=tuple(run))], now_s=0.0)

    def restore(self, at: int) -> None:
        """A block that was there before comes back: equal prefixes have equal hashes."""
        known = [
            (parent, block)
            for parent, block in self.removed
            if block not in self.tree.parents and (parent == 0 or parent in self.tree.parents)
        ]
        if known:
            parent, block = known[at % len(known)]
            self.tree.parents[block] = parent
            self.session.changed([Extend(parent=parent or None, blocks=(block,))], now_s=0.0)

    def trim(self, at: int, count: int) -> None:
        removed = []
        for _ in range(min(count, len(self.tree.parents))):
            leaves = self.tree.leaves()
            leaf = leaves[at % len(leaves)]
            self.removed.append((self.tree.parents.pop(leaf), leaf))
            removed.append(leaf)
        self.session.changed([Trim(blocks=tuple(sorted(removed)))], now_s=0.0)

    def clear(self) -> None:
        self.tree.parents.clear()
        self.session.changed([Clear()], now_s=0.0)

    def send(self, at_most: int) -> None:
        for _ in range(at_most):
            message = self.session.next_message(now_s=0.0)
            if message is None:
                return
            self.receiver.apply(message)
            self._check_bounds()

    def _check_bounds(self) -> None:
        session, receiver = self.session, self.receiver
        assert session.unacknowledged_messages <= self.window
        delivered = session.delivered
        assert delivered.blocks == len(receiver.parents)
        assert delivered.digest == sum(receiver.parents) & _MASK
        if receiver.next_sequence is not None:
            assert delivered.next_sequence == receiver.next_sequence

    def acknowledge(self, part: float) -> None:
        before = self.receiver.received - self.session.unacknowledged_messages
        self.session.acknowledged(before + round(part * self.session.unacknowledged_messages))

    def settle(self) -> None:
        for _ in range(10_000):
            self.send(10_000)
            self.acknowledge(1.0)
            if not self.session.owes:
                return
        raise AssertionError("the session never comes to rest")


_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("extend"), st.integers(0, 10_000), st.integers(1, 9)),
        st.tuples(st.just("trim"), st.integers(0, 10_000), st.integers(1, 9)),
        st.tuples(st.just("restore"), st.integers(0, 10_000)),
        st.tuples(st.just("clear")),
        st.tuples(st.just("replace")),
        st.tuples(st.just("send"), st.integers(1, 5)),
        st.tuples(st.just("acknowledge"), st.floats(0, 1)),
        st.tuples(st.just("request")),
    ),
    max_size=60,
)


def _take(pair: _Pair, name: str, *arguments: float) -> None:
    if name == "request":
        pair.session.snapshot_requested()
    elif name == "replace":
        pair.tree.parents = dict(list(pair.tree.parents.items())[: len(pair.tree.parents) // 2])
        pair.session.replaced()
    else:
        getattr(pair, name)(*arguments)


@given(
    steps=_STEPS,
    window=st.integers(1, 4),
    blocks_per_message=st.integers(1, 8),
    floor_blocks=st.sampled_from([0, 3, 4096]),
)
@settings(max_examples=400, deadline=None)
def test_receiver_reconstructs_the_mirror_whatever_happens(
    steps: list[tuple[str, ...]], window: int, blocks_per_message: int, floor_blocks: int
) -> None:
    pair = _Pair(window=window, blocks_per_message=blocks_per_message, floor_blocks=floor_blocks)
    for name, *arguments in steps:
        in_view = len(pair.receiver.parents)
        _take(pair, name, *arguments)  # type: ignore[arg-type]
        staged = len(pair.receiver.staged or ())
        bound = 2 * (pair.tree.blocks + in_view + staged + pair.new_block)
        assert pair.session.pending_blocks <= bound
    pair.settle()
    assert pair.receiver.parents == pair.tree.parents
    assert pair.session.lag_s(5.0) == 0.0


def test_a_block_that_comes_and_goes_while_the_window_is_full_is_never_sent() -> None:
    pair = _Pair(window=1, blocks_per_message=100, floor_blocks=4096)
    pair.send(1)
    for turn in range(500):
        pair.extend(0, 3)
        pair.trim(turn, 3)
    assert pair.session.pending_blocks == 0
    assert not pair.session.owes


def test_a_difference_that_outgrows_the_mirror_becomes_a_snapshot() -> None:
    pair = _Pair(window=1, blocks_per_message=1000, floor_blocks=10)
    pair.extend(0, 200)
    pair.send(1)
    pair.trim(0, 150)
    assert pair.session.in_snapshot
    assert pair.session.pending_blocks == 0
    pair.acknowledge(1.0)
    message = pair.session.next_message(now_s=0.0)
    assert isinstance(message, SnapshotPart)
    assert sum(len(blocks) for _, blocks in message.runs) == 50


def test_window_holds_messages_back_until_they_are_acknowledged() -> None:
    pair = _Pair(window=2, blocks_per_message=4, floor_blocks=4096)
    pair.extend(0, 40)
    pair.send(100)
    assert pair.receiver.received == 2
    assert pair.session.window_is_full
    pair.session.acknowledged(1)
    pair.send(100)
    assert pair.receiver.received == 3


def test_a_request_during_a_snapshot_is_answered_by_it() -> None:
    pair = _Pair(window=1, blocks_per_message=4, floor_blocks=4096)
    pair.extend(0, 12)
    pair.send(1)
    pair.session.snapshot_requested()
    pair.settle()
    assert pair.receiver.received == 3


def test_an_impossible_acknowledgement_is_refused() -> None:
    pair = _Pair(window=2, blocks_per_message=4, floor_blocks=4096)
    pair.send(1)
    with pytest.raises(SessionError, match="acknowledged 7 messages; 1 were sent"):
        pair.session.acknowledged(7)
    pair.session.acknowledged(1)
    with pytest.raises(SessionError, match="acknowledged 0 messages"):
        pair.session.acknowledged(0)


def test_lag_is_the_age_of_the_oldest_change_not_acknowledged() -> None:
    tree = _TreeOfBlocks()
    session = Session(tree, window_messages=2)
    session.next_message(now_s=10.0)
    session.acknowledged(1)
    assert session.lag_s(12.0) == 0.0
    tree.parents[5] = 0
    session.changed([Extend(parent=None, blocks=(5,))], now_s=20.0)
    assert session.lag_s(23.0) == 3.0
    session.next_message(now_s=24.0)
    assert session.lag_s(25.0) == 5.0
    session.acknowledged(2)
    assert session.lag_s(26.0) == 0.0


@pytest.mark.parametrize("wrong", [{"window_messages": 0}, {"window_messages": 1, "blocks_per_message": 0}])
def test_sizes_below_one_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must"):
        Session(_TreeOfBlocks(), **wrong)
