"""The mirror against a slow one that keeps every page's whole path and computes all blocks anew after each event."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from kvrouting_core.blocks import ChainHasher
from kvrouting_core.tree_mirror import TreeMirror
from tests.core.mirror_by_definition import (
    KEY,
    MODULUS,
    Event,
    Removed,
    SlowMirror,
    Step,
    Stored,
    View,
    block_sizes,
    check,
    is_of_an_engine,
    next_event,
    page_hash,
    page_sizes,
    send,
    steps,
)


@settings(max_examples=80, deadline=None)
@given(page_sizes, block_sizes, st.lists(steps, max_size=40))
def test_an_exact_mirror_equals_the_slow_one_after_every_event(size: int, block_size: int, history: list[Step]) -> None:
    hasher = ChainHasher(KEY, block_size)
    mirror, slow, view = TreeMirror(hasher, model="m", exact=True), SlowMirror(hasher), View()
    for step in history:
        event = next_event(step, slow, size)
        if event is not None:
            view.apply(send(mirror, event, size))
            check(mirror, slow, view)


@settings(max_examples=60, deadline=None)
@given(page_sizes, block_sizes, st.lists(steps, max_size=30), st.integers(0, 10**6))
def test_a_snapshot_may_come_in_any_order_and_twice(
    size: int, block_size: int, history: list[Step], order: int
) -> None:
    chance = random.Random(order)
    hasher = ChainHasher(KEY, block_size)
    slow = SlowMirror(hasher)
    for step in filter(is_of_an_engine, history):
        next_event(step, slow, size)
    mirror, view = TreeMirror(hasher, model="m", exact=True), View()
    view.apply(mirror.begin_snapshot())
    pieces = snapshot_in_pieces(slow, size, chance)
    for piece in pieces + chance.sample(pieces, len(pieces) // 3):
        view.apply(send(mirror, piece, size))
    mirror.end_snapshot()
    check(mirror, slow, view)
    for step in reversed(history):
        event = next_event(step, slow, size)
        if event is not None:
            view.apply(send(mirror, event, size))
            check(mirror, slow, view)


def snapshot_in_pieces(slow: SlowMirror, size: int, chance: random.Random) -> list[Event]:
    """Each live page once, in runs of random length, shuffled."""
    left = {path for path, _ in slow.paths.values()}
    pieces: list[Event] = []
    for path in sorted(left, key=lambda path: (-len(path), path)):
        end = path
        while end in left:
            first = len(end) // size - 1
            left.discard(end)
            while first and end[: first * size] in left and chance.random() < 0.8:
                left.discard(end[: first * size])
                first -= 1
            pieces.append(Stored(end, first))
            end = end[: first * size]
    chance.shuffle(pieces)
    return pieces


@settings(max_examples=80, deadline=None)
@given(
    st.sampled_from([1, 3, 16, 48]),
    st.lists(steps, min_size=5, max_size=30),
    st.integers(0, 30),
    st.integers(0, 10**6),
)
def test_a_fuzzy_snapshot_and_the_events_after_its_position_give_the_live_tree(
    size: int, history: list[Step], position: int, order: int
) -> None:
    """The engine goes on while its pages are read, each at a moment of its own."""
    chance = random.Random(order)
    hasher = ChainHasher(KEY, 16)
    slow = SlowMirror(hasher)
    of_an_engine = list(filter(is_of_an_engine, history))
    position = min(position, len(of_an_engine))
    for step in of_an_engine[:position]:
        next_event(step, slow, size)
    versions = [dict(slow.paths)]
    events: list[Event] = []
    for step in of_an_engine[position:]:
        event = next_event(step, slow, size)
        if event is not None:
            events.append(event)
            versions.append(dict(slow.paths))
    mirror, view = TreeMirror(hasher, model="m", exact=True), View()
    view.apply(mirror.begin_snapshot())
    read = sorted({entry[0] for version in versions for entry in version.values()})
    chance.shuffle(read)
    for path in read:
        if page_hash(path) in chance.choice(versions):
            view.apply(send(mirror, Stored(path, len(path) // size - 1), size))
    for event in events:
        view.apply(send(mirror, event, size))
    mirror.end_snapshot()
    check(mirror, slow, view)


@settings(max_examples=80, deadline=None)
@given(page_sizes, st.lists(steps, max_size=30), st.sets(st.integers(0, 29), max_size=3))
def test_a_mirror_that_empties_itself_in_doubt_never_claims_too_much(
    size: int, history: list[Step], desyncs: set[int]
) -> None:
    hasher = ChainHasher(KEY, 64)
    mirror, slow, view = TreeMirror(hasher, model="m", exact=False), SlowMirror(hasher), View()
    for number, step in enumerate(history):
        if number in desyncs:
            view.apply(mirror.cleared())
        event = next_event(step, slow, size)
        if event is not None:
            view.apply(send(mirror, event, size))
        present = slow.present()
        assert view.blocks <= present
        assert (mirror.blocks, mirror.block_digest) == (len(view.blocks), sum(view.blocks) % MODULUS)
        assert mirror.pages <= len(slow.paths)
        if not desyncs:
            assert view.blocks == present


@settings(max_examples=50, deadline=None)
@given(st.sampled_from([1, 16, 48]), st.lists(steps, max_size=30))
def test_a_page_hash_without_the_adapter_never_credits_across_adapters(size: int, history: list[Step]) -> None:
    """Two trees of one engine, whose page hashes say nothing of the adapter."""
    hasher = ChainHasher(KEY, 16)
    mirror, view = TreeMirror(hasher, model="m", exact=False), View()
    trees = {adapter: SlowMirror(hasher, adapter=adapter) for adapter in (None, "adapter")}
    for step in history:
        adapter = "adapter" if step.seed % 2 else None
        event = next_event(step, trees[adapter], size)
        if isinstance(event, Stored):
            path, first = event.path, event.first
            hashes = [page_hash(path[: end * size]) for end in range(first + 1, len(path) // size + 1)]
            view.apply(
                mirror.stored(
                    page_hash(path[: first * size]) if first else None,
                    hashes,
                    path[first * size :],
                    page_size=size,
                    lora_adapter=adapter,
                )
            )
        elif isinstance(event, Removed):
            view.apply(mirror.removed(event.pages))
        elif event is not None:
            for tree in trees.values():
                tree.paths.clear()
            view.apply(mirror.cleared())
        assert view.blocks <= trees[None].present() | trees["adapter"].present()
        assert (mirror.blocks, mirror.block_digest) == (len(view.blocks), sum(view.blocks) % MODULUS)
