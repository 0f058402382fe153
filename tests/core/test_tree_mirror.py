"""The mirror against a slow one that keeps every page's whole path and computes all blocks anew after each event."""

from __future__ import annotations

import functools
import hashlib
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrouting_core.blocks import ChainHasher, Namespace
from kvrouting_core.deltas import Clear, Delta, Extend, Trim
from kvrouting_core.tree_mirror import MirrorInDoubtError, TreeMirror

KEY = b"0123456789abcdef"
MODULUS = 2**64

Path = tuple[int, ...]


@functools.lru_cache(maxsize=20_000)
def page_hash(path: Path, namespace: str = "") -> int:
    """As an engine does it: a signed 64-bit hash of everything up to the page's end."""
    data = namespace.encode() + b"|" + b"".join(token.to_bytes(4, "big") for token in path)
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "big", signed=True)


def blocks_of(hasher: ChainHasher, path: Path, adapter: str | None = None, salt: str | None = None) -> list[int]:
    return list(_blocks_of(hasher.block_size, path, adapter, salt))


@functools.lru_cache(maxsize=20_000)
def _blocks_of(block_size: int, path: Path, adapter: str | None, salt: str | None) -> tuple[int, ...]:
    namespace = Namespace(model="m", lora_adapter=adapter, cache_salt=salt)
    return tuple(ChainHasher(KEY, block_size).hash_blocks(namespace, path).tolist())


@dataclass(frozen=True)
class Stored:
    """The pages of a path from page `first` on."""

    path: Path
    first: int


@dataclass(frozen=True)
class Removed:
    """Pages that are gone, in the order in which the event names them."""

    pages: tuple[int, ...]


@dataclass(frozen=True)
class Cleared:
    """All pages are gone."""


Event = Stored | Removed | Cleared


@dataclass
class SlowMirror:
    """Live pages with their whole paths."""

    hasher: ChainHasher
    paths: dict[int, tuple[Path, int | None]] = field(default_factory=dict)  # page → its path, its parent
    adapter: str | None = None
    seen: set[Path] = field(default_factory=set)  # paths of all pages that ever were

    def see(self, event: Event, size: int) -> Event:
        if isinstance(event, Cleared):
            self.paths.clear()
        elif isinstance(event, Removed):
            for page in event.pages:
                self.paths.pop(page, None)
        else:
            path = event.path
            for end in range((event.first + 1) * size, len(path) + 1, size):
                parent = page_hash(path[: end - size]) if end > size else None
                self.paths[page_hash(path[:end])] = (path[:end], parent)
                self.seen.add(path[:end])
        return event

    def present(self) -> set[int]:
        blocks: set[int] = set()
        for path, parent in self.paths.values():
            ancestor = parent
            while ancestor is not None and ancestor in self.paths:
                ancestor = self.paths[ancestor][1]
            if ancestor is None:
                blocks.update(blocks_of(self.hasher, path, self.adapter))
        return blocks


class View:
    """What a router makes of the deltas; it insists on what they promise."""

    def __init__(self) -> None:
        self.blocks: set[int] = set()

    def apply(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            if isinstance(delta, Clear):
                self.blocks.clear()
            elif isinstance(delta, Trim):
                assert delta.blocks
                assert len(set(delta.blocks)) == len(delta.blocks)
                assert self.blocks.issuperset(delta.blocks)
                self.blocks.difference_update(delta.blocks)
            else:
                assert delta.blocks
                assert delta.parent is None or delta.parent in self.blocks
                assert self.blocks.isdisjoint(delta.blocks)
                self.blocks.update(delta.blocks)


def chunks_to_set(chunks: Iterable[Extend]) -> set[int]:
    view = View()
    view.apply(list(chunks))
    return view.blocks


def check(mirror: TreeMirror, slow: SlowMirror, view: View) -> None:
    present = slow.present()
    assert view.blocks == present
    assert (mirror.blocks, mirror.block_digest) == (len(present), sum(present) % MODULUS)
    assert (mirror.pages, mirror.page_digest) == (len(slow.paths), sum(slow.paths) % MODULUS)
    assert chunks_to_set(mirror.snapshot(chunk_blocks=3)) == present


def send(mirror: TreeMirror, event: Event, size: int) -> list[Delta]:
    if isinstance(event, Removed):
        return mirror.removed(list(event.pages))
    if isinstance(event, Cleared):
        return mirror.cleared()
    path, first = event.path, event.first
    parent = page_hash(path[: first * size]) if first else None
    hashes = [page_hash(path[: end * size]) for end in range(first + 1, len(path) // size + 1)]
    return mirror.stored(parent, hashes, list(path[first * size :]), page_size=size)


@dataclass(frozen=True)
class Step:
    """One draw of a history; numbers are taken modulo what there is."""

    kind: str
    which: int
    where: int
    length: int
    seed: int


kinds = st.sampled_from(["store"] * 6 + ["trim"] * 4 + ["restore", "return", "return", "scatter", "scatter", "clear"])
steps = st.builds(
    Step,
    kind=kinds,
    which=st.integers(0, 10**6),
    where=st.integers(0, 10**6),
    length=st.integers(1, 6),
    seed=st.integers(0, 10**6),
)
page_sizes = st.integers(1, 64) | st.sampled_from([1, 2, 16, 48, 64])
block_sizes = st.sampled_from([16, 17, 64, 128])


def choose_path(step: Step, slow: SlowMirror, size: int) -> Path:
    """A new path that leaves some live path at a page, often in the midst of a routing block."""
    live = sorted(path for path, _ in slow.paths.values())
    trunk = live[step.which % len(live)] if live and step.which % 4 else ()
    kept = step.where % (len(trunk) // size + 1) * size
    tokens = random.Random(step.seed)
    more = step.length * max(1, 40 // size) * size
    return trunk[:kept] + tuple(tokens.randrange(3) for _ in range(more))


def leaves(slow: SlowMirror) -> list[int]:
    parents = {parent for _, parent in slow.paths.values()}
    return sorted(page for page in slow.paths if page not in parents)


def tail(slow: SlowMirror, leaf: int, length: int) -> list[int]:
    """The leaf and its ancestors as long as they have no other child; the first page first."""
    children: dict[int | None, int] = {}
    for _, parent in slow.paths.values():
        children[parent] = children.get(parent, 0) + 1
    pages = [leaf]
    while len(pages) < length:
        parent = slow.paths[pages[0]][1]
        if parent is None or parent not in slow.paths or children[parent] > 1:
            break
        pages.insert(0, parent)
    return pages


def next_event(step: Step, slow: SlowMirror, size: int) -> Event | None:
    """The event of a step, which the slow mirror has seen already; None: the step finds nothing to do."""
    chance = random.Random(step.seed)
    if step.kind == "store":
        path = choose_path(step, slow, size)
        live_pages = 0  # at the path's start
        while live_pages < len(path) // size and page_hash(path[: (live_pages + 1) * size]) in slow.paths:
            live_pages += 1
        return slow.see(Stored(path, step.where % (live_pages + 1)), size)
    if not slow.paths:
        return None
    if step.kind == "restore":
        return slow.see(Stored(sorted(path for path, _ in slow.paths.values())[step.which % len(slow.paths)], 0), size)
    if step.kind == "return":
        return returning(step, slow, size)
    if step.kind == "trim":
        ends = leaves(slow)
        pages = tail(slow, ends[step.which % len(ends)], step.length if step.where % 2 else 1)
        if step.where % 3 == 0:
            chance.shuffle(pages)
        return slow.see(Removed(tuple(pages)), size)
    if step.kind == "scatter":
        live = sorted(slow.paths)
        return slow.see(Removed(tuple(chance.sample(live, min(len(live), step.length)))), size)
    return slow.see(Cleared(), size) if step.which % 3 == 0 else None


def returning(step: Step, slow: SlowMirror, size: int) -> Event | None:
    """A page that was removed is stored again behind its parent, which itself may have lost its beginning."""
    candidates = sorted(
        path
        for path in slow.seen
        if page_hash(path) not in slow.paths and (len(path) == size or page_hash(path[:-size]) in slow.paths)
    )
    if not candidates:
        return None
    path = candidates[step.which % len(candidates)]
    return slow.see(Stored(path, len(path) // size - 1), size)


def is_of_an_engine(step: Step) -> bool:
    """Whether a real engine would do this: it never leaves a page behind whose parent is gone."""
    return step.kind != "scatter"


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
    size: int, history: list[Step], doubts: set[int]
) -> None:
    hasher = ChainHasher(KEY, 64)
    mirror, slow, view = TreeMirror(hasher, model="m", exact=False), SlowMirror(hasher), View()
    for number, step in enumerate(history):
        if number in doubts:
            view.apply(mirror.cleared())
        event = next_event(step, slow, size)
        if event is not None:
            view.apply(send(mirror, event, size))
        present = slow.present()
        assert view.blocks <= present
        assert (mirror.blocks, mirror.block_digest) == (len(view.blocks), sum(view.blocks) % MODULUS)
        assert mirror.pages <= len(slow.paths)
        if not doubts:
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


# --- single cases ---

SIZE = 16
LONG: Path = tuple(range(64))  # 4 pages of 16 tokens, 4 blocks of 16


def new_mirror(*, block_size: int = 16, exact: bool = True) -> TreeMirror:
    return TreeMirror(ChainHasher(KEY, block_size), model="m", exact=exact)


def pages_of(path: Path, size: int = SIZE) -> list[int]:
    return [page_hash(path[:end]) for end in range(size, len(path) + 1, size)]


def test_a_block_is_present_once_the_page_with_its_last_token_is_stored() -> None:
    mirror, hasher = new_mirror(block_size=64), ChainHasher(KEY, 64)
    path = tuple(range(96))
    assert send(mirror, Stored(path[:48], 0), 48) == []
    assert send(mirror, Stored(path, 1), 48) == [Extend(parent=None, blocks=tuple(blocks_of(hasher, path)))]
    assert send(mirror, Removed((page_hash(path),)), 48) == [Trim(blocks=tuple(blocks_of(hasher, path)))]


def test_siblings_that_share_a_block_hold_it_together() -> None:
    """Pages of 48 tokens, blocks of 64: two second pages may differ only after the block's end."""
    mirror, hasher = new_mirror(block_size=64), ChainHasher(KEY, 64)
    one, other = tuple(range(96)), (*range(80), *range(500, 516))
    shared = blocks_of(hasher, one)
    assert shared == blocks_of(hasher, other)
    send(mirror, Stored(one, 0), 48)
    assert send(mirror, Stored(other, 1), 48) == []
    assert send(mirror, Removed((page_hash(one),)), 48) == []
    assert mirror.blocks == 1
    assert send(mirror, Removed((page_hash(other),)), 48) == [Trim(blocks=tuple(shared))]


def test_descendants_of_a_removed_page_stay_counted_and_return_with_it() -> None:
    mirror = new_mirror()
    send(mirror, Stored(LONG, 0), SIZE)
    blocks = blocks_of(ChainHasher(KEY, 16), LONG)
    pages = pages_of(LONG)
    (trim,) = mirror.removed([pages[1]])
    assert isinstance(trim, Trim)
    assert set(trim.blocks) == set(blocks[1:])
    assert (mirror.pages, mirror.blocks) == (3, 1)
    deltas = send(mirror, Stored(LONG[:32], 1), SIZE)
    assert deltas == [
        Extend(parent=blocks[0], blocks=tuple(blocks[1:2])),
        Extend(parent=blocks[1], blocks=tuple(blocks[2:])),
    ]


def test_a_page_returns_below_a_page_that_has_lost_its_beginning() -> None:
    mirror = new_mirror()
    send(mirror, Stored(LONG, 0), SIZE)
    pages = pages_of(LONG)
    mirror.removed([pages[2]])
    mirror.removed([pages[0]])
    assert send(mirror, Stored(LONG[:48], 2), SIZE) == []
    assert (mirror.pages, mirror.blocks) == (3, 0)
    send(mirror, Stored(LONG[:16], 0), SIZE)
    assert (mirror.pages, mirror.blocks) == (4, 4)


def test_the_last_page_of_a_trimmed_trunk_goes_before_its_branch() -> None:
    mirror = new_mirror(block_size=64)
    trunk, branch = tuple(range(40)), (*range(20), *range(100, 150))
    send(mirror, Stored(trunk, 0), 1)
    send(mirror, Stored(branch, 20), 1)
    mirror.removed(pages_of(trunk, 1)[20:])
    assert mirror.blocks == 1
    assert send(mirror, Removed((page_hash(trunk[:20]),)), 1) == [
        Trim(blocks=tuple(blocks_of(ChainHasher(KEY, 64), branch)))
    ]
    send(mirror, Stored(trunk[:20], 19), 1)
    assert mirror.blocks == 1


def test_an_exact_mirror_in_doubt_says_so_and_changes_nothing() -> None:
    mirror = new_mirror()
    send(mirror, Stored(LONG[:32], 0), SIZE)
    before = (mirror.pages, mirror.page_digest, mirror.blocks, mirror.block_digest)
    pages = pages_of(LONG)
    with pytest.raises(MirrorInDoubtError, match=str(pages[2])):
        send(mirror, Stored(LONG, 3), SIZE)
    with pytest.raises(MirrorInDoubtError, match=str(pages[3])):
        mirror.removed([pages[1], pages[3]])
    with pytest.raises(MirrorInDoubtError, match=str(pages[3])):
        mirror.removed([pages[3]])
    assert (mirror.pages, mirror.page_digest, mirror.blocks, mirror.block_digest) == before


def test_a_mirror_that_is_not_exact_drops_what_it_cannot_place() -> None:
    mirror = new_mirror(exact=False)
    pages = pages_of(LONG)
    assert send(mirror, Stored(LONG, 2), SIZE) == []
    assert mirror.removed(pages) == []
    assert mirror.pages == 0
    with pytest.raises(ValueError, match="clear it"):
        mirror.begin_snapshot()


def test_a_snapshot_with_a_page_that_never_came_is_in_doubt() -> None:
    mirror = new_mirror()
    mirror.begin_snapshot()
    send(mirror, Stored(LONG, 2), SIZE)
    with pytest.raises(MirrorInDoubtError, match=str(pages_of(LONG)[1])):
        mirror.end_snapshot()
    mirror.begin_snapshot()
    mirror.removed(pages_of(LONG))
    send(mirror, Stored(LONG, 0), SIZE)
    mirror.end_snapshot()
    assert mirror.blocks == 4


def test_orphans_may_be_trimmed_and_cut_before_their_parent_comes() -> None:
    mirror = new_mirror()
    path = tuple(range(160))
    pages = pages_of(path)
    mirror.begin_snapshot()
    send(mirror, Stored(path, 1), SIZE)
    mirror.removed([pages[9]])
    mirror.removed([pages[5]])
    assert send(mirror, Stored(path[:16], 0), SIZE) != []
    assert (mirror.pages, mirror.blocks) == (8, 5)
    send(mirror, Stored(path[:96], 5), SIZE)
    mirror.end_snapshot()
    assert (mirror.pages, mirror.blocks) == (9, 9)


def test_a_contested_page_carries_no_block_until_it_is_removed_and_stored_again() -> None:
    mirror = new_mirror()
    pages = pages_of(LONG)
    send(mirror, Stored(LONG, 0), SIZE)
    deltas = mirror.stored(None, pages[:2], LONG[:32], page_size=SIZE, cache_salt="tenant")
    assert len(deltas) == 1
    assert (mirror.pages, mirror.page_digest) == (4, sum(pages) % MODULUS)
    assert mirror.blocks == 0
    assert mirror.stored(pages[1], [123], LONG[:16], page_size=SIZE, cache_salt="tenant") == []
    assert mirror.pages == 5
    mirror.removed([123, pages[0], pages[1]])
    assert (mirror.pages, mirror.page_digest) == (2, sum(pages[2:]) % MODULUS)
    send(mirror, Stored(LONG[:32], 0), SIZE)
    assert mirror.blocks == 4


def test_a_child_of_another_namespace_contests_its_parent() -> None:
    mirror = new_mirror()
    pages = pages_of(LONG)
    send(mirror, Stored(LONG[:32], 0), SIZE)
    mirror.stored(pages[1], pages[2:], LONG[32:], page_size=SIZE, lora_adapter="a")
    assert (mirror.pages, mirror.blocks) == (4, 1)


def test_an_orphan_does_not_follow_a_page_of_another_namespace() -> None:
    mirror = new_mirror()
    pages = pages_of(LONG)
    mirror.begin_snapshot()
    mirror.stored(pages[1], pages[2:], LONG[32:], page_size=SIZE, lora_adapter="a")
    send(mirror, Stored(LONG[:32], 0), SIZE)
    assert mirror.blocks == 2
    with pytest.raises(MirrorInDoubtError):
        mirror.end_snapshot()


def test_the_namespace_is_part_of_a_block() -> None:
    mirror = new_mirror()
    for number, (adapter, salt) in enumerate(((None, None), ("a", None), (None, "s"), ("a", "s"))):
        pages = [page_hash(LONG[:16], str(number))]
        deltas = mirror.stored(None, pages, LONG[:16], page_size=SIZE, lora_adapter=adapter, cache_salt=salt)
        expected = blocks_of(ChainHasher(KEY, 16), LONG[:16], adapter, salt)
        assert deltas == [Extend(parent=None, blocks=tuple(expected))]
    assert mirror.blocks == 4


def test_a_snapshot_stands_for_the_moment_of_the_call() -> None:
    mirror = new_mirror()
    send(mirror, Stored(LONG, 0), SIZE)
    chunks = mirror.snapshot(chunk_blocks=3)
    mirror.cleared()
    blocks = blocks_of(ChainHasher(KEY, 16), LONG)
    assert list(chunks) == [
        Extend(parent=None, blocks=tuple(blocks[:3])),
        Extend(parent=blocks[2], blocks=tuple(blocks[3:])),
    ]


def test_a_long_run_is_searched_for_a_branch_in_its_midst() -> None:
    mirror = new_mirror()
    path = tuple(i % 7 for i in range(1000))
    send(mirror, Stored(path, 0), 1)
    branch = (*path[:503], *range(100, 150))
    send(mirror, Stored(branch, 503), 1)
    hasher = ChainHasher(KEY, 16)
    assert mirror.blocks == len({*blocks_of(hasher, path), *blocks_of(hasher, branch)})


def test_numbers_that_contradict_each_other_are_named() -> None:
    mirror = new_mirror()
    with pytest.raises(ValueError, match="3 tokens for 2 pages of 2"):
        mirror.stored(None, [1, 2], [1, 2, 3], page_size=2)
    with pytest.raises(ValueError, match="page size 65"):
        mirror.stored(None, [], [], page_size=65)
    with pytest.raises(ValueError, match="signed"):
        mirror.stored(None, [2**63], [1], page_size=1)
    with pytest.raises(ValueError, match="twice"):
        mirror.stored(None, [1, 1], [1, 2], page_size=1)
    with pytest.raises(ValueError, match="block size 8"):
        new_mirror(block_size=8)
    with pytest.raises(ValueError, match="chunk_blocks 0"):
        mirror.snapshot(chunk_blocks=0)
    assert (mirror.pages, mirror.blocks) == (0, 0)
