"""The mirror by its definition: every page's whole path is kept, all blocks are computed anew; and histories for it."""

from __future__ import annotations

import functools
import hashlib
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from hypothesis import strategies as st

from kvrouting_core.blocks import ChainHasher, Namespace
from kvrouting_core.deltas import Clear, Delta, Extend, Trim
from kvrouting_core.tree_mirror import TreeMirror

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
