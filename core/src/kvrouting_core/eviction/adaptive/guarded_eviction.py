"""The frame: lets a victim rule evict what it likes while that costs not clearly more loads than RLT would have had."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvrouting_core.eviction.adaptive.block_records import BlockNames, BlockRecord, pages_per_block
from kvrouting_core.eviction.adaptive.debt import Debt
from kvrouting_core.eviction.adaptive.ghost import GhostRLT
from kvrouting_core.eviction.adaptive.leaf_pool import FallbackPool, LeafPool
from kvrouting_core.eviction.adaptive.victim_rule import VictimRule, Visit
from kvrouting_core.eviction.base import EvictionPolicy, ExposeParent, PathAccess, TreeSite


@dataclass(frozen=True, slots=True, kw_only=True)
class GuaranteeParameters:
    """Of the guarantee. epsilon: loads allowed beyond the ghost's, as a share of these; beta: the debt that is allowed,
    credit: how much may be saved up, both as shares of the capacity. always_safe: as the ghost, whatever the rule.
    """

    epsilon: float = 0.02
    beta: float = 0.25
    credit: float = 0.25
    always_safe: bool = False


class _Bound:
    """What depends on the tree that the policy serves."""

    __slots__ = ("block_pages", "block_tokens", "capacity", "debt", "ghost", "names", "site")

    def __init__(self, site: TreeSite, guarantee: GuaranteeParameters) -> None:
        self.site = site
        self.block_pages = pages_per_block(site.page_tokens)
        self.block_tokens = self.block_pages * site.page_tokens
        self.capacity = max(1, site.capacity_pages // self.block_pages)
        self.names = BlockNames(self.block_pages)
        self.debt = Debt(
            capacity=site.capacity_pages,
            epsilon=guarantee.epsilon,
            beta=guarantee.beta,
            credit=guarantee.credit,
            always_safe=guarantee.always_safe,
        )


class GuardedEviction(EvictionPolicy[BlockRecord]):
    """Evicts what the rule picks, out of all unlocked leaves (E) or, in safe mode, of those not in the ghost (E2).

    Loads and capacity are counted in pages, those of a block together. A block is cached while the page that ends
    it is; one that is loaded in parts is counted with all its pages.
    """

    def __init__(self, rule: VictimRule, rng: random.Random, *, guarantee: GuaranteeParameters | None = None) -> None:
        """rng: of the ghost's coins, no one else's."""
        self._rule = rule
        self._rng = rng
        self._guarantee = guarantee or GuaranteeParameters()
        self._site: _Bound | None = None
        self._longest = 0
        self._started: BlockRecord | None = None
        self._clear_pools()

    # ---- figures -------------------------------------------------------------------------------------------------

    @property
    def debt(self) -> Debt:
        """Φ, the mode, and the loads of both caches since the start, in pages."""
        return self._bound().debt

    @property
    def capacity_pages(self) -> int:
        """B."""
        return self._bound().site.capacity_pages

    @property
    def longest_path_pages(self) -> int:
        """p: of the paths so far."""
        return self._longest

    def figures(self) -> dict[str, int | bool]:
        """What shows the guarantee at work, in tokens, since the policy serves its tree.

        phi_tokens: Φ; phi_limit_tokens: above which safe mode begins, β·B; phi_bound_tokens: which Φ never exceeds,
        (1 + β)·B + p. own_loaded_tokens, ghost_loaded_tokens: F and F_V. safe_mode: whether it is on; safe_entries: how
        often it began.
        """
        bound, debt = self._bound(), self._bound().debt
        capacity, page = bound.site.capacity_pages, bound.site.page_tokens
        limit = self._guarantee.beta * capacity
        return {
            "phi_tokens": round(debt.phi * page),
            "phi_limit_tokens": round(limit * page),
            "phi_bound_tokens": round((limit + capacity + self._longest) * page),
            "safe_mode": debt.is_safe,
            "safe_entries": debt.safe_entries,
            "own_loaded_tokens": debt.own_loads * page,
            "ghost_loaded_tokens": debt.ghost_loads * page,
        }

    # ---- what the tree tells -------------------------------------------------------------------------------------

    def attached(self, site: TreeSite) -> None:
        bound = self._site = _Bound(site, self._guarantee)
        self._ghost = GhostRLT(
            capacity=site.capacity_pages,
            rng=self._rng,
            is_locked=self._is_locked,
            on_load=self._ghost_loaded,
            on_evict=self._ghost_evicted,
        )
        self._rule.sized(bound.capacity)

    def record(self, owner: Any, pages: int) -> BlockRecord:
        self._bound()
        return BlockRecord(owner, pages)

    def admitted(self, access: PathAccess[BlockRecord]) -> None:
        bound = self._bound()
        if not access.pages:
            return
        visit = self._visit(access)
        self._longest = max(self._longest, access.pages)
        labels = self._rule.admitted(visit)
        for name, label in zip(visit.names[visit.hit :], labels, strict=True):
            self._announced[name] = label
        while len(self._announced) > bound.capacity:
            self._announced.popitem(last=False)
        now = self._rule.now
        for record in access.records:
            record.accessed = now
            self._refresh(record)
        loaded, _ = self._use_in_ghost(visit.names, access.pages)
        bound.debt.settle(own=0, ghost=loaded, announced=self._announced_pages())

    def inserted(self, access: PathAccess[BlockRecord]) -> None:
        bound = self._bound()
        if not access.pages:
            return
        names = bound.names.of_path(access)
        self._longest = max(self._longest, access.pages)
        fresh = self._fresh(access, names)
        promised = {name for _, new in fresh for name in new if name in self._announced}
        labels = self._labels_of(fresh, access)
        _, loaded = self._use_in_ghost(names, access.pages)
        self._hold(fresh, labels)
        sizes = self._sizes(names, access.pages)
        bound.debt.settle(
            own=sum(sizes[name] for name in labels),
            # What the ghost gave up since the admission was counted then.
            ghost=sum(sizes[name] for name in loaded if name not in promised),
            announced=self._announced_pages(),
        )

    def split(self, record: BlockRecord, prefix_owner: Any, prefix_pages: int) -> BlockRecord:
        upper = record.split_off(prefix_owner, prefix_pages, self._bound().block_pages)
        if upper.names:
            self._held[upper.names[-1]] = upper
        return upper

    def trimmed(self, record: BlockRecord, pages: int) -> None:
        record.pages -= pages
        surplus = record.end - record.start - record.pages
        if surplus > 0:  # not chosen here
            for name, label in self._shortened(record, surplus):
                self._lose(name, label, in_ghost=name in self._ghost.names)
            self._place(record)

    def evictable(self, record: BlockRecord) -> None:
        if record.pool_index < 0:
            self._leaves.add(record)
        self._place(record)

    def pinned(self, record: BlockRecord) -> None:
        if record.pool_index >= 0:
            self._leaves.remove(record)
        if record.fallback_index >= 0:
            self._fallback.remove(record)

    def choose(self, pages: int, expose_parent: ExposeParent) -> list[tuple[BlockRecord, int]]:
        block_pages = self._bound().block_pages
        self._press_ghost()
        taken: dict[BlockRecord, int] = {}
        while pages > 0:
            record = self._next_victim()
            if record is None:
                break
            cut = record.tail_pages(block_pages)
            if cut > pages:
                cut = pages
            pages -= cut
            taken[record] = taken[record] + cut if record in taken else cut
            for name, label in self._shortened(record, cut):  # at most the block that the tail ended
                self._lose(name, label, in_ghost=record.fallback_index < 0)
            if record.end > record.start:
                self._started = record if record.end % block_pages else None
                self._place(record)
                continue
            self.pinned(record)
            parent = expose_parent(record)
            if parent is not None:
                self.evictable(parent)
        return list(taken.items())

    def clear(self) -> None:
        for leaf in self._leaves:
            leaf.pool_index = leaf.fallback_index = -1
        self._clear_pools()
        if self._site is not None:
            self._ghost.clear()
            self._rule.clear()
            self._site.debt.forgive()

    # ---- victims -------------------------------------------------------------------------------------------------

    def _next_victim(self) -> BlockRecord | None:
        """The leaf whose block was begun, else the rule's pick; None if there is no leaf.

        In safe mode, if the ghost holds the tails of all leaves, the tree needs room that the ghost has not made yet,
        or for something that is no path: then the ghost evicts as well.
        """
        bound, started = self._bound(), self._started
        if started is not None:
            if started.fallback_index >= 0 and started.tail_name(bound.block_pages) is None:
                return started
            self._started = None
        pool = self._leaves
        if not pool.leaves:
            return None
        if bound.debt.is_safe:
            pool = self._fallback
            while not pool.leaves and self._ghost.evict():
                pass
        return self._rule.pick(pool)

    def _press_ghost(self) -> None:
        """What running requests hold outside the tree is room that the ghost must not have either."""
        limit = (len(self._held) + len(self._announced)) * self._bound().block_pages + self._longest
        ghost = self._ghost
        while ghost.used > limit and ghost.evict():
            pass

    def _place(self, record: BlockRecord) -> None:
        """Puts an evictable leaf into E2 or takes it out, by what its tail is; tells the pools what became of it."""
        if record.pool_index < 0:
            return
        self._leaves.refresh(record)
        name = record.tail_name(self._bound().block_pages)
        if name is None or name not in self._ghost.names:
            if record.fallback_index < 0:
                self._fallback.add(record)
            else:
                self._fallback.refresh(record)
        elif record.fallback_index >= 0:
            self._fallback.remove(record)

    def _refresh(self, record: BlockRecord) -> None:
        if record.pool_index >= 0:
            self._leaves.refresh(record)
        if record.fallback_index >= 0:
            self._fallback.refresh(record)

    def _shortened(self, record: BlockRecord, pages: int) -> list[tuple[int, int]]:
        """Takes pages off a record's tail. Returns (name, label) of the blocks that are no longer whole."""
        lost = record.shorten(pages, self._bound().block_pages)
        if lost and record.names:
            self._held[record.names[-1]] = record
        return lost

    def _lose(self, name: int, label: int, *, in_ghost: bool) -> None:
        """A block is no longer cached."""
        del self._held[name]
        if in_ghost:
            self._ghost_only += 1
        memory = self._bound().capacity - self._ghost_only
        self._rule.evicted(name, label, memory=max(0, memory))

    # ---- names ---------------------------------------------------------------------------------------------------

    def _visit(self, access: PathAccess[BlockRecord]) -> Visit:
        bound = self._bound()
        names = bound.names.of_path(access)
        hit = len(names) if access.hit_pages == access.pages else access.hit_pages // bound.block_pages
        return Visit(
            names=names,
            hit=hit,
            records=access.records,
            block_tokens=bound.block_tokens,
            block_pages=bound.block_pages,
            in_ghost=self._ghost.names,
        )

    def _fresh(self, access: PathAccess[BlockRecord], names: Sequence[int]) -> list[tuple[BlockRecord, Sequence[int]]]:
        """The records that this insert adds blocks to, with the names of these."""
        block_pages = self._bound().block_pages
        fresh: list[tuple[BlockRecord, Sequence[int]]] = []
        start = 0
        for record in access.records:
            end = start + record.pages
            if not record.is_named:
                record.start, record.end = start, end
                record.is_named = True
                record.accessed = self._rule.now
                self._refresh(record)
                fresh.append((record, names[start // block_pages : end // block_pages]))
            start = end
        for record in access.records[:-1]:
            record.had_child = True
        last = access.records[-1]
        if access.pages % block_pages and not last.has_partial_block:
            last.has_partial_block = True
            fresh.append((last, names[-1:]))
        return [(record, new) for record, new in fresh if new]

    def _labels_of(
        self, fresh: Sequence[tuple[BlockRecord, Sequence[int]]], access: PathAccess[BlockRecord]
    ) -> dict[int, int]:
        """name → label of what is loaded now: as announced by an admission, else as the rule says."""
        announced = self._announced
        labels: dict[int, int] = {}
        unknown = False
        for _, names in fresh:
            for name in names:
                label = announced.pop(name, -1)
                labels[name] = label
                unknown = unknown or label < 0
        if unknown:
            visit = self._visit(access)
            said = dict(zip(visit.names[visit.hit :], self._rule.extended(visit), strict=True))
            for name, label in labels.items():
                if label < 0:
                    labels[name] = said.get(name, 0)
        return labels

    def _hold(self, fresh: Sequence[tuple[BlockRecord, Sequence[int]]], labels: dict[int, int]) -> None:
        in_ghost, held = self._ghost.names, self._held
        for record, names in fresh:
            if record.names:
                held[record.names[-1]] = None
            record.extend(names, bytes([labels[name] for name in names]))
            for name in names:
                held[name] = None
                if name in in_ghost:
                    self._ghost_only -= 1
            held[names[-1]] = record
            self._place(record)

    # ---- the ghost -----------------------------------------------------------------------------------------------

    def _use_in_ghost(self, names: Sequence[int], pages: int) -> tuple[int, Sequence[int]]:
        """Tells the ghost of a path. Returns what it had to load: (pages, names)."""
        size = self._bound().block_pages
        last_size = pages % size or size
        count = self._ghost.access(names, size=size, last_size=last_size)
        return (count - 1) * size + last_size if count else 0, names[len(names) - count :]

    def _sizes(self, names: Sequence[int], pages: int) -> dict[int, int]:
        """Pages of each block of a path."""
        size = self._bound().block_pages
        sizes = dict.fromkeys(names, size)
        sizes[names[-1]] = pages % size or size
        return sizes

    def _announced_pages(self) -> int:
        """At most so many pages are about to be loaded."""
        return len(self._announced) * self._bound().block_pages

    def _is_locked(self, name: int) -> bool:
        record = self._held.get(name)
        return record is not None and self._bound().site.is_locked(record.owner)

    def _ghost_loaded(self, name: int) -> None:
        if name not in self._held:
            self._ghost_only += 1
            return
        record = self._held[name]
        if record is not None and record.fallback_index >= 0:
            self._place(record)

    def _ghost_evicted(self, name: int) -> None:
        if name not in self._held:
            self._ghost_only -= 1
            return
        record = self._held[name]
        if record is not None:
            self._place(record)

    def _bound(self) -> _Bound:
        if self._site is None:
            raise RuntimeError("this policy serves a tree: call `attached` with the tree's size first")
        return self._site

    def _clear_pools(self) -> None:
        self._leaves, self._fallback = LeafPool(), FallbackPool()
        # Names of the blocks in the cache; with the record whose last one it is, if it is that.
        self._held: dict[int, BlockRecord | None] = {}
        self._announced: OrderedDict[int, int] = OrderedDict()
        self._started = None
        self._ghost_only = 0
