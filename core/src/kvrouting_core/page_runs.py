"""A run: consecutive pages of one path of an engine's radix tree, without their tokens.

A prefix sum (see `blocks`) needs only its state to go on, so a run keeps eight bytes of hash and eight of state for
each page, and a child may hang on any page, also one that ends inside a routing block. A run whose parent has not
come yet cannot compute its states; it holds its tokens until then.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

import numpy as np

from kvrouting_core.blocks import ChainHasher, Namespace, Tokens, token_array

_SCAN_BY_NUMPY_FROM = 64


class PageRun:
    """Pages p_0 … p_{n-1}, each the parent of the next. A child run hangs on one of them.

    parent_hash: the page before p_0; None: p_0 starts a prompt. parent, parent_index: where that page is, while it
    is live. start: tokens before p_0. attached: all pages before p_0 are live up to the root, so that the run's
    blocks are present. held_tokens: set as long as the state before p_0 is unknown.
    """

    __slots__ = (
        "attached",
        "blocks",
        "children",
        "hashes",
        "held_tokens",
        "namespace",
        "page_tokens",
        "parent",
        "parent_hash",
        "parent_index",
        "start",
        "start_state",
        "states",
    )

    def __init__(self, *, namespace: Namespace, parent_hash: int | None, page_tokens: int) -> None:
        self.namespace = namespace
        self.parent_hash = parent_hash
        self.page_tokens = page_tokens
        self.parent: PageRun | None = None
        self.parent_index = 0
        self.children: dict[int, list[PageRun]] = {}
        self.hashes: array[int] = array("q")  # of pages, signed as on the engine's wire
        self.states: array[int] = array("Q")  # after each page
        self.blocks: array[int] = array("Q")  # routing blocks that end in these pages
        self.start = 0
        self.start_state = 0
        self.held_tokens: array[int] | None = array("I")
        self.attached = False

    def __len__(self) -> int:
        return len(self.hashes)

    @property
    def last(self) -> int:
        """The index of the last page."""
        return len(self.hashes) - 1

    def index_of(self, page_hash: int) -> int:
        """Where a page of this run is. Raises: ValueError if it is none."""
        if self.hashes[-1] == page_hash:
            return len(self.hashes) - 1
        if len(self.hashes) < _SCAN_BY_NUMPY_FROM:
            return self.hashes.index(page_hash)
        places = np.flatnonzero(np.frombuffer(self.hashes, dtype=np.int64) == page_hash)
        if not places.size:
            raise ValueError(f"page {page_hash} is not in this run")
        return int(places[0])

    def blocks_before(self, index: int, block_size: int) -> int:
        """How many of the run's blocks end before page `index`."""
        if self.held_tokens is not None:
            return 0
        return (self.start + index * self.page_tokens) // block_size - self.start // block_size

    def state_after(self, index: int) -> tuple[int, int]:
        """Position and state at the end of a page of a run that is resolved."""
        return self.start + (index + 1) * self.page_tokens, self.states[index]

    def may_grow_at(self, index: int, page_tokens: int) -> bool:
        """Whether pages after page `index` may join this run instead of becoming a run of their own."""
        return index == self.last and page_tokens == self.page_tokens

    def append(self, page_hashes: Sequence[int], tokens: Tokens, hasher: ChainHasher) -> None:
        """Pages after the last one. Raises: ValueError for a hash that is not a signed 64-bit number."""
        try:
            added = array("q", page_hashes)
        except OverflowError as error:
            raise ValueError(
                f"page hashes {min(page_hashes)}..{max(page_hashes)} are not signed 64-bit numbers: "
                "pass them as the engine's events carry them, or through to_signed"
            ) from error
        if self.held_tokens is not None:
            self.held_tokens.frombytes(token_array(tokens).tobytes())
        else:
            self._advance(tokens, hasher)
        self.hashes += added

    def resolve(self, position: int, state: int, hasher: ChainHasher) -> None:
        """What precedes the run is known now: position and state before p_0."""
        tokens, self.held_tokens = self.held_tokens, None
        self.start, self.start_state = position, state
        if tokens:
            self._advance(tokens, hasher)

    def _advance(self, tokens: Tokens, hasher: ChainHasher) -> None:
        position = self.start + len(self.states) * self.page_tokens
        states = hasher.states(self.states[-1] if self.states else self.start_state, position, tokens)
        self.states.frombytes(states[self.page_tokens - 1 :: self.page_tokens].tobytes())
        size = hasher.block_size
        ends = states[size - 1 - position % size :: size]
        if ends.size:
            self.blocks.frombytes(hasher.finalize(ends).tobytes())

    def link(self, parent: PageRun, index: int) -> None:
        """Hang this run on page `index` of another."""
        self.parent, self.parent_index = parent, index
        parent.children.setdefault(index, []).append(self)

    def unlink(self) -> None:
        """Take this run off its parent, if it hangs on one."""
        if self.parent is None:
            return
        siblings = self.parent.children[self.parent_index]
        siblings.remove(self)
        if not siblings:
            del self.parent.children[self.parent_index]
        self.parent = None

    def children_from(self, index: int) -> list[PageRun]:
        """The runs that hang on page `index` or a later one."""
        if not self.children:
            return []
        places: Iterator[int] | list[int]
        if len(self) - index < len(self.children):
            places = [place for place in range(index, len(self)) if place in self.children]
        else:
            places = [place for place in self.children if place >= index]
        return [child for place in places for child in self.children[place]]

    def piece(self, first: int, end: int, block_size: int) -> PageRun:
        """Pages first..end-1, 0 < first < end, as a run of their own that hangs nowhere, without children."""
        part = PageRun(namespace=self.namespace, parent_hash=self.hashes[first - 1], page_tokens=self.page_tokens)
        part.hashes = self.hashes[first:end]
        if self.held_tokens is not None:
            part.held_tokens = self.held_tokens[first * self.page_tokens : end * self.page_tokens]
            return part
        part.held_tokens = None
        part.start, part.start_state = self.state_after(first - 1)
        part.states = self.states[first:end]
        part.blocks = self.blocks[self.blocks_before(first, block_size) : self.blocks_before(end, block_size)]
        return part

    def pop_between_blocks(self, page_hash: int, block_size: int) -> bool:
        """Drop the last page if it is this one and nothing else is concerned. Returns: whether it was dropped.

        Something else: a block that ends in it, a child that hangs on it, a run that would be empty.
        """
        size, last = self.page_tokens, len(self.hashes) - 1
        if not last or self.hashes[last] != page_hash or self.held_tokens is not None or last in self.children:
            return False
        end = self.start + last * size
        if (end + size) // block_size != end // block_size:
            return False
        self.hashes.pop()
        self.states.pop()
        return True

    def truncate(self, keep: int, block_size: int) -> None:
        """Keep the first pages. Children on the others are the caller's to move first."""
        del self.blocks[self.blocks_before(keep, block_size) :]
        del self.hashes[keep:]
        if self.held_tokens is not None:
            del self.held_tokens[keep * self.page_tokens :]
        else:
            del self.states[keep:]
