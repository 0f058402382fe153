"""Single cases of the mirror, each for what it teaches."""

from __future__ import annotations

import pytest

from kvrouting_core.blocks import ChainHasher
from kvrouting_core.deltas import Extend, Trim
from kvrouting_core.tree_mirror import MirrorDesynchronizedError, TreeMirror
from tests.core.mirror_by_definition import (
    KEY,
    MODULUS,
    Path,
    Removed,
    Stored,
    blocks_of,
    page_hash,
    send,
)

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
    with pytest.raises(MirrorDesynchronizedError, match=str(pages[2])):
        send(mirror, Stored(LONG, 3), SIZE)
    with pytest.raises(MirrorDesynchronizedError, match=str(pages[3])):
        mirror.removed([pages[1], pages[3]])
    with pytest.raises(MirrorDesynchronizedError, match=str(pages[3])):
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
    with pytest.raises(MirrorDesynchronizedError, match=str(pages_of(LONG)[1])):
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
    with pytest.raises(MirrorDesynchronizedError):
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
