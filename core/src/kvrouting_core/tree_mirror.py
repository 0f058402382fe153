"""The radix tree of an engine, rebuilt from its page events and told on in routing blocks.

An engine speaks of pages (1 to 64 tokens, a hash of its own each), the router of routing blocks (16 to 128
tokens, keyed hashes); neither size need divide the other. The mirror keeps the live pages as runs (see
`page_runs`) and turns each event into deltas of blocks. A block is *present* when the page that holds its last
token is live and so are all pages before it: what is present is always closed under prefixes.

A page whose parent is gone stays counted, since the engine has it, but carries no block. It gets its blocks back
when the parent returns. The same waiting place serves a snapshot, where a parent may come after its children.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence

from kvrouting_core.blocks import ChainHasher, Namespace, Tokens, routing_block_size
from kvrouting_core.blocks import page_size as checked_page_size
from kvrouting_core.deltas import Clear, Delta, Extend, Trim
from kvrouting_core.page_runs import PageRun

_MASK = (1 << 64) - 1


class MirrorDesynchronizedError(Exception):
    """An event does not fit what the mirror holds, so one was lost; the mirror needs a snapshot."""


class TreeMirror:
    """Live pages of one engine, and the routing blocks that they make present.

    exact: the mirror starts from a snapshot and must equal the engine's tree: an event that does not fit raises
    MirrorInDoubtError. Otherwise it is a subset: a chain whose beginning was not seen is dropped, the removal of
    an unknown page is ignored.

    A page hash that the engine uses in two namespaces at once (it may leave the LoRA adapter out of the hash) says
    nothing about the tokens of either: such a page is counted and carries no block until it is removed.
    """

    def __init__(self, hasher: ChainHasher, *, model: str, exact: bool) -> None:
        """hasher: of routing blocks. model: the name that is part of each namespace.

        Raises: ValueError if the hasher's block size is no routing block size.
        """
        self._block_size = routing_block_size(hasher.block_size)
        self._hasher = hasher
        self._model = model
        self._exact = exact
        self._settling = False
        self._forget()

    def _forget(self) -> None:
        self._pages: dict[int, PageRun] = {}
        self._roots: dict[PageRun, None] = {}
        self._waiting: dict[int, list[PageRun]] = {}  # by the page they need
        self._contested: set[int] = set()  # live in several namespaces, in no run
        self._holders: dict[int, int] = {}  # present block → pages that end it; siblings may share a block
        self._page_sum = 0
        self._block_sum = 0

    @property
    def pages(self) -> int:
        """Live pages, those without blocks too: what the engine's own count says."""
        return len(self._pages) + len(self._contested)

    @property
    def page_digest(self) -> int:
        """Sum of the live page hashes, as unsigned numbers, modulo 2^64."""
        return self._page_sum & _MASK

    @property
    def blocks(self) -> int:
        """Present routing blocks."""
        return len(self._holders)

    @property
    def block_digest(self) -> int:
        """Sum of the present blocks' hashes modulo 2^64."""
        return self._block_sum & _MASK

    def stored(
        self,
        parent_page_hash: int | None,
        page_hashes: Sequence[int],
        token_ids: Tokens,
        *,
        page_size: int,
        lora_adapter: str | None = None,
        cache_salt: str | None = None,
    ) -> list[Delta]:
        """The engine holds these pages, each the parent of the next; token_ids: page_size of them for each page.

        parent_page_hash: the page before the first; None: they start a prompt. Storing a live page again changes
        nothing. Returns: Extend deltas, parents first; none as long as the parent is not there.
        Raises: MirrorInDoubtError (exact, outside a snapshot) for an unknown parent, and nothing is changed;
        ValueError for numbers that contradict each other.
        """
        if len(token_ids) != len(page_hashes) * checked_page_size(page_size):
            raise ValueError(f"{len(token_ids)} tokens for {len(page_hashes)} pages of {page_size} tokens")
        base = None if parent_page_hash is None else self._pages.get(parent_page_hash)
        if not page_hashes or (base is None and not self._may_follow(parent_page_hash)):
            return []
        namespace = Namespace(model=self._model, lora_adapter=lora_adapter, cache_salt=cache_salt)
        known = self._any_live(page_hashes)
        if self._is_contested(parent_page_hash, page_hashes, namespace, known=known):
            return self._contest(parent_page_hash, page_hashes, namespace)
        extends: list[Delta] = []
        for first, end in self._new_intervals(page_hashes) if known else ((0, len(page_hashes)),):
            before = page_hashes[first - 1] if first else parent_page_hash
            tokens = token_ids[first * page_size : end * page_size]
            self._place(before, page_hashes[first:end], tokens, page_size, namespace, extends)
        return extends

    def removed(self, page_hashes: Sequence[int]) -> list[Delta]:
        """The engine no longer holds these pages, in any order.

        Pages that hang on one of them stay and lose their blocks. Returns: one Trim, or nothing.
        Raises: MirrorInDoubtError (exact, outside a snapshot) for an unknown page, and nothing is changed.
        """
        pages = self._pages
        if len(page_hashes) == 1:  # the most frequent event of an engine that trims tails
            run = pages.get(page_hashes[0])
            if run is not None and run.pop_between_blocks(page_hashes[0], self._block_size):
                self._page_sum -= page_hashes[0]
                del pages[page_hashes[0]]
                return []
        known = dict.fromkeys(page for page in page_hashes if page in pages)
        if len(known) < len(page_hashes):
            self._remove_unknown(page_hashes)
        trimmed: list[int] = []
        self._page_sum -= sum(known)
        self._take_out(known, trimmed)
        return self._trim(trimmed)

    def cleared(self) -> list[Delta]:
        """The engine holds nothing; also what a mirror that is not exact does in doubt."""
        self._forget()
        return [Clear()]

    def begin_snapshot(self) -> list[Delta]:
        """Forget all and take, in any order, the stored pages of a snapshot and then the events after it.

        Until `end_snapshot` a page may come before its parent, and the removal of an unknown page is ignored.
        Raises: ValueError if the mirror is not exact: what it missed is not in doubt but not there.
        """
        if not self._exact:
            raise ValueError("a mirror that is not exact takes no snapshot: clear it")
        self._settling = True
        return self.cleared()

    def end_snapshot(self) -> None:
        """All events up to the moment when the snapshot was complete are in.

        Raises: MirrorInDoubtError if a page still waits for its parent.
        """
        self._settling = False
        lonely = [parent for parent in self._waiting if parent not in self._contested]
        if lonely:
            raise MirrorDesynchronizedError(
                f"{len(lonely)} pages were never stored and have children, one is {lonely[0]}"
            )

    def snapshot(self, chunk_blocks: int = 1024) -> Iterator[Extend]:
        """All present blocks, each once, parents first, at most chunk_blocks in a delta.

        The iterator stands for the moment of the call, whatever comes later.
        """
        if chunk_blocks < 1:
            raise ValueError(f"chunk_blocks {chunk_blocks} must be at least 1")
        return iter(self._chunks(chunk_blocks))

    def _chunks(self, chunk_blocks: int) -> list[Extend]:
        chunks: list[Extend] = []
        seen: set[int] = set()
        stack = list(self._roots)
        while stack:
            run = stack.pop()
            stack.extend(child for children in run.children.values() for child in children)
            first = 0
            while first < len(run.blocks) and run.blocks[first] in seen:
                first += 1
            shared = [block for block in run.blocks[first:] if self._holders[block] > 1]
            seen.update(shared)
            for start in range(first, len(run.blocks), chunk_blocks):
                blocks = tuple(run.blocks[start : start + chunk_blocks])
                chunks.append(Extend(parent=self._block_before(run, start), blocks=blocks))
        return chunks

    # --- storing ---

    def _may_follow(self, parent: int | None) -> bool:
        """Whether pages may be stored after a page that is in no run."""
        if parent is None or self._settling or parent in self._contested:
            return True
        if self._exact:
            raise MirrorDesynchronizedError(f"a page was stored after page {parent}, which is unknown")
        return False

    def _any_live(self, page_hashes: Sequence[int]) -> bool:
        """Whether one of these consecutive pages is live."""
        if not self._waiting and not self._contested:
            return page_hashes[0] in self._pages  # each live page's parent is live, too
        return not self._pages.keys().isdisjoint(page_hashes)

    def _new_intervals(self, page_hashes: Sequence[int]) -> list[tuple[int, int]]:
        """Where pages follow one another that are not live: first..end-1."""
        if len(set(page_hashes)) != len(page_hashes):
            raise ValueError(f"a page appears twice among {len(page_hashes)} consecutive ones")
        intervals: list[tuple[int, int]] = []
        first = None
        for index, page in enumerate(page_hashes):
            if page in self._pages:
                if first is not None:
                    intervals.append((first, index))
                first = None
            elif first is None:
                first = index
        if first is not None:
            intervals.append((first, len(page_hashes)))
        return intervals

    def _place(
        self,
        before: int | None,
        page_hashes: Sequence[int],
        tokens: Tokens,
        page_size: int,
        namespace: Namespace,
        extends: list[Delta],
    ) -> None:
        """Put pages that are not live behind a page, or at the start of a prompt."""
        base = None if before is None else self._pages.get(before)
        index = base.index_of(before) if base is not None and before is not None else 0
        if base is not None and base.may_grow_at(index, page_size):
            run, first = base, len(base)
        else:
            run, first = PageRun(namespace=namespace, parent_hash=before, page_tokens=page_size), 0
            if before is None:
                run.resolve(0, self._hasher.root(namespace), self._hasher)
            elif base is not None and base.held_tokens is None:
                run.resolve(*base.state_after(index), self._hasher)
        entries = dict.fromkeys(page_hashes, run)
        if len(entries) != len(page_hashes):
            raise ValueError(f"a page appears twice among {len(page_hashes)} consecutive ones")
        run.append(page_hashes, tokens, self._hasher)
        live_before = len(self._pages)
        self._pages.update(entries)
        if len(self._pages) != live_before + len(entries):
            raise MirrorDesynchronizedError(f"a page behind page {before} is live with another parent")
        self._page_sum += sum(page_hashes)
        if run is not base:
            self._hang(run, base, index)
        if run.attached:
            self._acquire(run, run.blocks_before(first, self._block_size), extends)
        if self._waiting:
            self._welcome(run, first, extends)

    def _hang(self, run: PageRun, base: PageRun | None, index: int) -> None:
        if run.parent_hash is None:
            self._roots[run] = None
            run.attached = True
        elif base is None:
            self._waiting.setdefault(run.parent_hash, []).append(run)
        else:
            run.namespace = base.namespace  # equal; one object for the whole tree below
            run.link(base, index)
            run.attached = base.attached

    def _welcome(self, run: PageRun, first: int, extends: list[Delta]) -> None:
        """Hang on the run's pages from `first` on what has waited for them."""
        for page in self._waiting.keys() & run.hashes[first:]:
            index = run.index_of(page)
            strangers = []
            for child in self._waiting.pop(page):
                if child.namespace == run.namespace:
                    child.link(run, index)
                    self._settle(child, extends)
                else:
                    strangers.append(child)
            if strangers:
                self._waiting[page] = strangers

    def _settle(self, child: PageRun, extends: list[Delta]) -> None:
        """Pass on to a run and all below it what its new parent knows."""
        open_runs = [child]
        while open_runs:
            run = open_runs.pop()
            parent = run.parent
            if parent is None or parent.held_tokens is not None:
                continue
            if run.held_tokens is not None:
                run.resolve(*parent.state_after(run.parent_index), self._hasher)
            if parent.attached and not run.attached:
                run.attached = True
                self._acquire(run, 0, extends)
            open_runs.extend(below for children in run.children.values() for below in children)

    def _acquire(self, run: PageRun, first_block: int, extends: list[Delta]) -> None:
        """The run's blocks from one on are present."""
        holders = self._holders
        blocks = run.blocks[first_block:]
        shared = 0
        for block in blocks:
            held = holders.get(block, 0)
            holders[block] = held + 1
            if held:
                shared += 1  # a sibling's page ends the same block: such blocks come before all others
        if shared < len(blocks):
            fresh = tuple(blocks[shared:])
            self._block_sum += sum(fresh)
            extends.append(Extend(parent=self._block_before(run, first_block + shared), blocks=fresh))

    def _block_before(self, run: PageRun, block: int) -> int | None:
        """The block before the run's block of that number; None if that one starts a prompt."""
        while not block:
            if run.parent is None:
                return None
            block = run.parent.blocks_before(run.parent_index + 1, self._block_size)
            run = run.parent
        return run.blocks[block - 1]

    # --- removing ---

    def _remove_unknown(self, page_hashes: Iterable[int]) -> None:
        unknown = [page for page in page_hashes if page not in self._pages]
        lost = [page for page in unknown if page not in self._contested]
        if lost and self._exact and not self._settling:
            raise MirrorDesynchronizedError(f"{len(lost)} unknown pages were removed, one is {lost[0]}")
        released = self._contested.intersection(unknown)
        self._contested -= released
        self._page_sum -= sum(released)

    def _trim(self, trimmed: list[int]) -> list[Delta]:
        if not trimmed:
            return []
        self._block_sum -= sum(trimmed)
        return [Trim(blocks=tuple(trimmed))]

    def _take_out(self, pages: Iterable[int], trimmed: list[int]) -> None:
        """Remove live pages from their runs."""
        gone_of: dict[PageRun, list[int]] = {}
        for page in pages:
            gone_of.setdefault(self._pages.pop(page), []).append(page)
        for run, gone in gone_of.items():
            keep = len(run) - len(gone)
            tail = run.hashes[keep:]
            if tail == array("q", gone) or set(tail) == set(gone):
                self._shorten(run, keep, trimmed)
            else:
                self._cut(run, set(gone), trimmed)

    def _shorten(self, run: PageRun, keep: int, trimmed: list[int]) -> None:
        """Only the run's first pages stay; what hangs on the others waits for them to return."""
        for child in run.children_from(keep):
            child.unlink()
            self._detach(child, trimmed)
            self._wait(child)
        if run.attached:
            self._release(run, run.blocks_before(keep, self._block_size), trimmed)
        run.truncate(keep, self._block_size)
        if not keep:
            self._unhook(run)

    def _cut(self, run: PageRun, gone: set[int], trimmed: list[int]) -> None:
        """Pages in the midst of the run are gone: what is behind them becomes runs of their own, which wait."""
        holes = [index for index, page in enumerate(run.hashes) if page in gone]
        for hole, next_hole in zip(holes, [*holes[1:], len(run)], strict=True):
            first = hole + 1
            if first == next_hole:
                continue
            part = run.piece(first, next_hole, self._block_size)
            self._pages.update(dict.fromkeys(part.hashes, part))
            self._wait(part)
            for child in run.children_from(first):
                if child.parent_index < next_hole:
                    index = child.parent_index - first
                    child.unlink()
                    self._detach(child, trimmed)
                    child.link(part, index)
        self._shorten(run, holes[0], trimmed)

    def _detach(self, top: PageRun, trimmed: list[int]) -> None:
        """A run and all below it have lost their beginning."""
        open_runs = [top]
        while open_runs:
            run = open_runs.pop()
            if run.attached:
                run.attached = False
                self._release(run, 0, trimmed)
                open_runs.extend(below for children in run.children.values() for below in children)

    def _release(self, run: PageRun, first_block: int, trimmed: list[int]) -> None:
        holders = self._holders
        for block in run.blocks[first_block:]:
            held = holders[block]
            if held == 1:
                del holders[block]
                trimmed.append(block)
            else:
                holders[block] = held - 1

    def _wait(self, run: PageRun) -> None:
        if run.parent_hash is not None:
            self._waiting.setdefault(run.parent_hash, []).append(run)

    def _unhook(self, run: PageRun) -> None:
        """An empty run leaves the tree."""
        if run.parent_hash is None:
            del self._roots[run]
        elif run.parent is not None:
            run.unlink()
        else:
            waiting = self._waiting[run.parent_hash]
            waiting.remove(run)
            if not waiting:
                del self._waiting[run.parent_hash]

    # --- one page hash in several namespaces ---

    def _is_contested(
        self, parent: int | None, page_hashes: Sequence[int], namespace: Namespace, *, known: bool
    ) -> bool:
        if self._contested and not self._contested.isdisjoint((parent, *page_hashes)):
            return True
        base = None if parent is None else self._pages.get(parent)
        if base is not None and base.namespace != namespace:
            return True
        runs = {self._pages[page] for page in page_hashes if page in self._pages} if known else ()
        return any(run.namespace != namespace for run in runs)

    def _contest(self, parent: int | None, page_hashes: Sequence[int], namespace: Namespace) -> list[Delta]:
        """Count pages that say nothing about their tokens, and take back the blocks that they carried."""
        claimed = set(page_hashes)
        base = None if parent is None else self._pages.get(parent)
        if parent is not None and base is not None and base.namespace != namespace:
            claimed.add(parent)
        claimed -= self._contested
        trimmed: list[int] = []
        live = [page for page in claimed if page in self._pages]
        self._page_sum += sum(claimed) - sum(live)
        self._take_out(live, trimmed)
        self._contested |= claimed
        return self._trim(trimmed)
