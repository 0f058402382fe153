"""The mirror's promises under any loss: exact is equal, partial is a subset. Without sockets."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrouting_core.blocks import ChainHasher
from kvrouting_core.deltas import Clear, Delta, Extend, Trim
from kvrouting_sidecar.mirror_terms import EventSource, NeedIdentity, NeedReplay, NeedSnapshot, Source
from kvrouting_sidecar.rank_mirror import RankMirror
from kvrouting_sidecar.wire_events import EngineState, decode_batch, decode_chunk, decode_state
from tests.fakes.fake_engine import FakeEngine, FakeRank
from tests.fakes.running_sidecar import BLOCK_SIZE, HASH_KEY, expected_blocks


class _Engine(FakeRank):
    """A fake rank whose event socket is a list."""

    def __init__(self, *, page_size: int, replay_batches: int) -> None:
        super().__init__(FakeEngine(page_size=page_size, replay_batches=replay_batches), 0)
        self.sent: list[tuple[int, bytes]] = []

    def send(self, sequence: int, payload: bytes) -> None:
        self.sent.append((sequence, payload))

    def state(self) -> EngineState:
        return decode_state(msgspec.msgpack.encode(self._state_body()))

    def chunk(self, rng: random.Random) -> Any:
        events = [self._stored_event(page) for page in self.pages]
        rng.shuffle(events)
        body = {"epoch": self.epoch, "position": self.sequence, "events": events}
        return decode_chunk(msgspec.msgpack.encode(body))


class _View:
    """What a listener makes of what it hears."""

    def __init__(self) -> None:
        self.blocks: set[int] = set()
        self.mirror: RankMirror | None = None

    def changed(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            if isinstance(delta, Extend):
                assert delta.parent is None or delta.parent in self.blocks
                assert not self.blocks.intersection(delta.blocks)
                self.blocks.update(delta.blocks)
            elif isinstance(delta, Trim):
                assert self.blocks.issuperset(delta.blocks)
                self.blocks.difference_update(delta.blocks)
            else:
                assert isinstance(delta, Clear)
                self.blocks.clear()

    def replaced(self) -> None:
        assert self.mirror is not None
        self.blocks = {block for chain in self.mirror.snapshot() for block in chain.blocks}

    def new_epoch(self) -> None:
        self.blocks.clear()


class _Pair:
    """An engine and its mirror; the questions are answered at once."""

    def __init__(self, *, exact: bool, page_size: int, replay_batches: int, seed: int) -> None:
        self.engine = _Engine(page_size=page_size, replay_batches=replay_batches)
        self.view = _View()
        self.mirror = RankMirror(
            ChainHasher(HASH_KEY, BLOCK_SIZE),
            model="fake-model",
            capacity_tokens=100_000,
            page_size_tokens=page_size,
            listener=self.view,
        )
        self.view.mirror = self.mirror
        self.exact = exact
        self.start = 1
        self.rng = random.Random(seed)

    def prompt(self, seed: int) -> list[int]:
        """Prompts that share beginnings."""
        rng = random.Random(seed % 4)
        return rng.choices(range(50), k=40) + random.Random(seed).choices(range(50), k=10 + seed * 5)

    def act(self, action: str, seed: int) -> None:
        if action == "store":
            self.engine.store(self.prompt(seed), salt="s" if seed % 5 == 0 else None)
        elif action == "trim":
            self.engine.trim(self.prompt(seed), keep_pages=seed % 3 * 8)
        elif action == "clear":
            self.engine.clear()
        elif action == "lose":
            self.engine.lose(seed % 4 + 1)
        elif action == "forget":
            self.engine.replayable.clear()
        elif action == "restart":
            self.engine.forget_everything()
            self.engine.sent.clear()
            self.start += 1
            self.mirror.connection_changed()
        elif action == "repeat" and self.engine.replayable:
            self.engine.sent.append(self.engine.replayable[seed % len(self.engine.replayable)])
        elif action == "break":
            (self.mirror.connection_changed if seed % 2 else self.mirror.batches_dropped)()
        elif action == "compare" and self.exact:
            self.mirror.engine_state(self.engine.state())
        self.deliver()

    def deliver(self) -> None:
        sent = self.engine.sent
        while sent or self.mirror.need:
            if self.mirror.need:
                self.answer()
            elif self.mirror.offer(sent[0][0], decode_batch(sent[0][1]).events):
                sent.pop(0)

    def answer(self) -> None:
        need = self.mirror.need
        if isinstance(need, NeedIdentity):
            epoch = self.engine.epoch if self.exact else None
            event_source = EventSource(epoch=epoch, fingerprint=str(self.start))
            self.mirror.identified(event_source, fallback_epoch=f"start-{self.start}")
        elif isinstance(need, NeedReplay):
            self._replay(need.first)
        elif isinstance(need, NeedSnapshot):
            chunk = self.engine.chunk(self.rng)
            assert self.mirror.snapshot_begins(chunk.epoch, chunk.position)
            self.mirror.snapshot_piece(chunk.events)
            self.mirror.snapshot_complete(self.engine.state())

    def _replay(self, first: int) -> None:
        batches = 0
        for sequence, payload in list(self.engine.replayable):
            if sequence >= first:
                batches += 1
                if not self.mirror.offer(sequence, decode_batch(payload).events, replayed=True):
                    break
        self.mirror.replay_ended(batches=batches, failure=None)


_ACTIONS = [
    "store",
    "store",
    "store",
    "trim",
    "trim",
    "clear",
    "lose",
    "forget",
    "restart",
    "repeat",
    "break",
    "compare",
]
_STEPS = st.lists(st.tuples(st.sampled_from(_ACTIONS), st.integers(0, 5)), max_size=40)


@given(
    steps=_STEPS,
    page_size=st.sampled_from([1, 4, 24]),
    replay_batches=st.sampled_from([1, 3, 1000]),
    seed=st.integers(0, 3),
)
@settings(max_examples=300, deadline=None)
def test_a_partial_mirror_is_a_subset_of_the_cache_whatever_is_lost(
    steps: list[tuple[str, int]], page_size: int, replay_batches: int, seed: int
) -> None:
    pair = _Pair(exact=False, page_size=page_size, replay_batches=replay_batches, seed=seed)
    for action, number in steps:
        pair.act(action, number)
        at_the_end = pair.mirror.next_sequence == pair.engine.sequence
        if at_the_end:
            assert pair.view.blocks <= expected_blocks(pair.engine)
        assert pair.mirror.source is Source.PARTIAL
        assert pair.mirror.blocks == len(pair.view.blocks)


@given(
    steps=_STEPS,
    page_size=st.sampled_from([1, 4, 24]),
    replay_batches=st.sampled_from([1, 3, 1000]),
    seed=st.integers(0, 3),
)
@settings(max_examples=150, deadline=None)
def test_an_exact_mirror_equals_the_cache_once_it_has_compared(
    steps: list[tuple[str, int]], page_size: int, replay_batches: int, seed: int
) -> None:
    pair = _Pair(exact=True, page_size=page_size, replay_batches=replay_batches, seed=seed)
    for action, number in steps:
        pair.act(action, number)
        if pair.mirror.next_sequence == pair.engine.sequence:
            assert pair.view.blocks == expected_blocks(pair.engine)
    # Two answers without a step between them show a loss that no batch shows; the third compares.
    for _ in range(3):
        pair.act("compare", 0)
    assert pair.view.blocks == expected_blocks(pair.engine)
    assert pair.mirror.verification.held
    assert pair.mirror.verification.mismatches == 0
    assert pair.mirror.source is Source.EXACT
    assert pair.mirror.reason() == ""


def _settled(*, exact: bool) -> _Pair:
    pair = _Pair(exact=exact, page_size=1, replay_batches=100, seed=0)
    pair.act("store", 3)
    return pair


def test_a_batch_that_cannot_be_read_is_a_doubt() -> None:
    exact, partial = _settled(exact=True), _settled(exact=False)
    assert exact.mirror.undecodable(exact.engine.sequence, "garbage")
    assert isinstance(exact.mirror.need, NeedSnapshot)
    assert partial.view.blocks
    assert partial.mirror.undecodable(partial.engine.sequence, "garbage")
    assert partial.view.blocks == set()


def test_a_subset_larger_than_the_cache_is_a_doubt() -> None:
    pair = _settled(exact=False)
    mirror = RankMirror(
        ChainHasher(HASH_KEY, BLOCK_SIZE), model="m", capacity_tokens=40, page_size_tokens=1, listener=_View()
    )
    mirror._listener.mirror = mirror  # type: ignore[attr-defined]
    mirror.identified(EventSource(epoch=None, fingerprint="1"), fallback_epoch="1")
    mirror.replay_ended(batches=0, failure=None)
    mirror.offer(*_batch(pair.engine.replayable[0]))
    assert mirror.blocks == 0
    assert mirror.counts.desyncs == 1


def test_a_state_answer_of_another_process_asks_who_speaks() -> None:
    pair = _settled(exact=True)
    before = pair.mirror.epoch
    pair.engine.epoch = "another"
    pair.mirror.engine_state(pair.engine.state())
    assert isinstance(pair.mirror.need, NeedIdentity)
    pair.deliver()
    assert pair.mirror.epoch == "another" != before
    assert pair.mirror.counts.restarts == 1


def test_a_process_that_was_taken_for_another_comes_back_under_a_new_name() -> None:
    pair = _settled(exact=True)
    first = pair.mirror.epoch
    pair.mirror.connection_changed()
    pair.mirror.identified(EventSource(epoch=None, fingerprint=None), fallback_epoch="unknown")
    assert pair.mirror.epoch == "unknown"
    pair.deliver()
    pair.mirror.engine_state(pair.engine.state())
    pair.deliver()
    assert pair.mirror.epoch not in (first, "unknown")
    assert (pair.mirror.epoch or "").startswith(str(first))
    assert pair.mirror.source is Source.EXACT
    assert pair.view.blocks == expected_blocks(pair.engine) != set()


def test_a_silent_state_socket_does_not_hide_that_it_is_the_same_process() -> None:
    pair = _settled(exact=True)
    before = pair.mirror.epoch
    pair.mirror.connection_changed()
    pair.mirror.identified(EventSource(epoch=None, fingerprint="1"), fallback_epoch="1")
    assert pair.mirror.epoch == before
    assert pair.view.blocks
    assert pair.mirror.source is Source.PARTIAL


def test_pages_on_other_media_are_not_credited() -> None:
    pair = _settled(exact=True)
    before = set(pair.view.blocks)
    page = {"block_hashes": [5], "parent_block_hash": None, "token_ids": [1], "block_size": 1, "lora_id": None}
    pair.engine.publish([{"type": "BlockStored", "medium": "CPU_PINNED", **page}])
    pair.engine.publish([{"type": "BlockRemoved", "medium": "CPU_PINNED", "block_hashes": list(pair.engine.pages)}])
    pair.deliver()
    assert pair.view.blocks == before


@pytest.mark.parametrize("silent", [True, False])
def test_a_failed_snapshot_is_asked_for_again_unless_the_state_socket_is_lost(*, silent: bool) -> None:
    pair = _settled(exact=True)
    assert (pair.mirror.in_sync, pair.mirror.reason()) == (True, "")
    pair.mirror.undecodable(pair.engine.sequence, "garbage")
    assert (pair.mirror.in_sync, pair.mirror.reason()) == (False, "garbage")
    assert not pair.mirror.verification.held
    if silent:
        pair.mirror.state_lost("silent")
    pair.mirror.snapshot_failed("no answer")
    assert isinstance(pair.mirror.need, NeedSnapshot) is not silent
    assert (pair.mirror.blocks == 0) is silent
    assert pair.mirror.in_sync is silent  # as a subset of nothing; or what cannot be proven is not called proven


def _batch(item: tuple[int, bytes]) -> tuple[int, Any]:
    return item[0], decode_batch(item[1]).events


def test_a_partial_mirror_claims_nothing_once_its_connection_is_lost() -> None:
    """Whether the same process comes back is known seconds later; until then its cache may be gone."""
    pair = _Pair(exact=False, page_size=1, replay_batches=100, seed=1)
    pair.act("store", 3)
    assert pair.mirror.blocks == len(pair.view.blocks) > 0
    pair.mirror.connection_changed()
    assert pair.mirror.blocks == len(pair.view.blocks) == 0
