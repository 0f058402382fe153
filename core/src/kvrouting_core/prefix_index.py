"""Which worker holds which prefix: block → set of workers, as a bit mask.

A block's hash stands for all tokens up to its end, and the blocks of a worker are prefix-closed: it holds a
block only if it holds the blocks before it. So along a prompt "the worker holds block i" is true up to some i
and false after it, and the longest cached prefix of all workers is found by bisection instead of a walk.

Workers have slots, which are the bits of the masks. A worker that is dropped, or whose view is replaced,
leaves its old slot at once; the slot's bits are swept out of the masks later, some thousands of blocks at a
time, and no call ever visits everything. For the same reason the map is cut into shards: a dictionary of
10 million entries stops its caller for a second when it grows, one of 10 thousand does not.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

import numpy as np
import numpy.typing as npt

from kvrouting_core.identity import WorkerId

Blocks = Sequence[int] | npt.NDArray[np.uint64]
"""Unsigned 64-bit block hashes: a list, tuple, array('Q') or numpy array."""

_MASK = (1 << 64) - 1
_SHARDS = 1024
# The high bits choose the shard: a dictionary places its entries by the low ones, which must differ in it.
_SHARD_SHIFT = 64 - 10
_SWEPT_WITH_EACH_UPDATE = 4096
_REMEMBERED_GROUPS = 4096


@dataclass(slots=True)
class _Slot:
    """One bit of the masks and what is held under it."""

    number: int
    bit: int
    worker: WorkerId
    blocks: int = 0
    digest: int = 0
    unique: int = 0  # blocks whose mask is this bit alone


class PrefixIndex:
    """The longest cached prefix per worker, for prompts given as block hashes.

    Updates are idempotent: adding a block twice or removing an absent one changes neither count nor digest.
    Memory follows what the workers hold: a block that nobody holds has no entry.
    """

    def __init__(self) -> None:
        self._shards: list[dict[int, int]] = [{} for _ in range(_SHARDS)]
        self._slots: list[_Slot] = []  # by number, free ones too
        self._names: list[WorkerId] = []  # of their workers
        self._free: list[int] = []  # a heap: low numbers first keep the masks narrow
        self._live: dict[WorkerId, _Slot] = {}
        self._staged: dict[WorkerId, _Slot] = {}
        self._live_mask = 0
        self._retired_mask = 0
        self._next_swept_shard = 0
        self._groups: dict[int, tuple[WorkerId, ...]] = {}  # mask → its workers, forgotten when one goes live

    # --- questions ---

    def match(self, blocks: Blocks) -> dict[WorkerId, int]:
        """The longest cached prefix of each worker, by bisection.

        blocks: one hash per full block of the prompt, in order (length B). Returns: worker → leading blocks
        held, 1..B; a worker that holds none is absent; an empty prompt matches nobody.
        """
        chain = _as_list(blocks)
        held: dict[WorkerId, int] = {}
        shards = self._shards
        if not chain:
            return held
        group = shards[chain[0] >> _SHARD_SHIFT].get(chain[0], 0) & self._live_mask
        if not group:
            return held
        open_ranges = [(group, 1, len(chain))]  # each worker of the group holds at least .. at most that many
        while open_ranges:
            group, least, most = open_ranges.pop()
            while least < most:
                middle = (least + most + 1) >> 1
                block = chain[middle - 1]
                deeper = shards[block >> _SHARD_SHIFT].get(block, 0) & group
                if deeper == group:
                    least = middle
                elif deeper:
                    open_ranges.append((group ^ deeper, least, middle - 1))
                    group, least = deeper, middle
                else:
                    most = middle - 1
            held.update(dict.fromkeys(self._workers_of(group), least))
        return held

    def walk(self, blocks: Blocks) -> dict[WorkerId, int]:
        """The same as `match` by its definition: block by block, without relying on prefix closure."""
        held: dict[WorkerId, int] = {}
        group = self._live_mask
        for depth, block in enumerate(_as_list(blocks), 1):
            group &= self._shards[block >> _SHARD_SHIFT].get(block, 0)
            if not group:
                break
            held.update(dict.fromkeys(self._workers_of(group), depth))
        return held

    def audit(self, blocks: Blocks) -> dict[WorkerId, tuple[int, int]]:
        """Workers whose `match` and `walk` differ → both numbers (0: none held); empty if all is sound.

        Such a worker has blocks without their prefix: its deltas were wrong or lost, and it needs a snapshot.
        """
        matched, walked = self.match(blocks), self.walk(blocks)
        return {
            worker: (matched.get(worker, 0), walked.get(worker, 0))
            for worker in matched.keys() | walked.keys()
            if matched.get(worker, 0) != walked.get(worker, 0)
        }

    def holds(self, worker: WorkerId, block: int) -> bool:
        """Whether the worker holds the block; False if it is unknown."""
        slot = self._live.get(worker)
        return slot is not None and self._shards[block >> _SHARD_SHIFT].get(block, 0) & slot.bit != 0

    def count(self, worker: WorkerId) -> int:
        """Blocks that the worker holds; 0 if it is unknown."""
        slot = self._live.get(worker)
        return slot.blocks if slot else 0

    def digest(self, worker: WorkerId) -> int:
        """Sum of the worker's block hashes modulo 2^64; 0 if it is unknown."""
        slot = self._live.get(worker)
        return slot.digest if slot else 0

    def unique_blocks(self, worker: WorkerId) -> int:
        """Blocks that no other worker holds: what the pool loses with it; 0 if it is unknown.

        Too low while the remains of a dropped worker or a replaced view are being swept.
        """
        slot = self._live.get(worker)
        return slot.unique if slot else 0

    def workers(self) -> frozenset[WorkerId]:
        """The workers that are known, with or without blocks."""
        return frozenset(self._live)

    @property
    def mask_bits(self) -> int:
        """Width of the masks: the most slots that were needed at one time, for views and their remains."""
        return len(self._slots)

    def __len__(self) -> int:
        """Distinct blocks in memory, including what is still to be swept."""
        return sum(map(len, self._shards))

    # --- updates ---

    def add(self, worker: WorkerId, blocks: Blocks) -> int:
        """The worker also holds these blocks; an unknown one becomes known. Returns: blocks new to it."""
        slot = self._live.get(worker)
        if slot is None:
            slot = self._go_live(self._new_slot(worker))
        self._sweep_a_little()
        return self._insert(slot, _as_list(blocks))

    def remove(self, worker: WorkerId, blocks: Blocks) -> int:
        """The worker no longer holds these blocks. Returns: how many of them it held."""
        slot = self._live.get(worker)
        if slot is None:
            return 0
        self._sweep_a_little()
        return self._delete(slot, _as_list(blocks))

    def clear(self, worker: WorkerId) -> None:
        """The worker holds nothing now and stays known. Takes the same short time whatever it held."""
        if worker in self._live:
            self.swap(worker, ())

    def drop(self, worker: WorkerId) -> None:
        """Forget the worker and a snapshot under way for it. Takes the same short time whatever it held."""
        for views in (self._live, self._staged):
            slot = views.pop(worker, None)
            if slot is not None:
                self._retire(slot)

    def begin_snapshot(self, worker: WorkerId) -> None:
        """Start a new view of the worker; the present one keeps answering until `commit_snapshot`.

        A snapshot already under way for the worker is discarded.
        """
        self.abandon_snapshot(worker)
        self._staged[worker] = self._new_slot(worker)

    def add_to_snapshot(self, worker: WorkerId, blocks: Blocks) -> int:
        """One chunk of the new view. Returns: blocks new to it. Raises: KeyError without `begin_snapshot`."""
        self._sweep_a_little()
        return self._insert(self._staged[worker], _as_list(blocks))

    def commit_snapshot(self, worker: WorkerId) -> None:
        """The new view replaces the old one in one step. Raises: KeyError without `begin_snapshot`."""
        fresh = self._staged.pop(worker)
        old = self._live.pop(worker, None)
        if old is not None:
            self._retire(old)
        self._go_live(fresh)

    def abandon_snapshot(self, worker: WorkerId) -> None:
        """Discard the new view, if one was begun; the present one stays."""
        slot = self._staged.pop(worker, None)
        if slot is not None:
            self._retire(slot)

    def swap(self, worker: WorkerId, blocks: Blocks) -> None:
        """The worker holds exactly these blocks: a snapshot in one chunk."""
        self.begin_snapshot(worker)
        self.add_to_snapshot(worker, blocks)
        self.commit_snapshot(worker)

    def sweep(self, max_blocks: int = 1 << 62) -> bool:
        """Clear what dropped workers and replaced views left, about `max_blocks` visited blocks of it.

        Each update sweeps a little by itself; a caller that is idle may sweep more. Returns: whether anything
        is left to sweep.
        """
        visited = 0
        while self._retired_mask and visited < max_blocks:
            visited += 1 + len(self._shards[self._next_swept_shard])
            self._sweep_shard(self._next_swept_shard)
            self._next_swept_shard = (self._next_swept_shard + 1) % _SHARDS
        return self._retired_mask != 0

    # --- slots ---

    def _new_slot(self, worker: WorkerId) -> _Slot:
        number = heapq.heappop(self._free) if self._free else len(self._slots)
        slot = _Slot(number=number, bit=1 << number, worker=worker)
        if number == len(self._slots):
            self._slots.append(slot)
            self._names.append(worker)
        else:
            self._slots[number] = slot
            self._names[number] = worker
        return slot

    def _go_live(self, slot: _Slot) -> _Slot:
        self._groups.clear()
        self._live[slot.worker] = slot
        self._live_mask |= slot.bit
        return slot

    def _retire(self, slot: _Slot) -> None:
        self._live_mask &= ~slot.bit
        if slot.blocks:
            self._retired_mask |= slot.bit
        else:
            self._release(slot)

    def _release(self, slot: _Slot) -> None:
        self._retired_mask &= ~slot.bit
        heapq.heappush(self._free, slot.number)

    def _slot_of(self, bit: int) -> _Slot:
        return self._slots[bit.bit_length() - 1]

    def _workers_of(self, mask: int) -> tuple[WorkerId, ...]:
        workers = self._groups.get(mask)
        if workers is None:
            # The binary digits, lowest first, select the slots: no step in Python for each of them.
            workers = tuple(compress(self._names, map(int, bin(mask)[:1:-1])))
            if len(self._groups) >= _REMEMBERED_GROUPS:
                self._groups.clear()
            self._groups[mask] = workers
        return workers

    # --- masks ---

    def _insert(self, slot: _Slot, blocks: list[int]) -> int:
        shards, bit = self._shards, slot.bit
        alone = known = known_sum = 0
        for block in blocks:
            shard = shards[block >> _SHARD_SHIFT]
            mask = shard.get(block)
            if mask is None:
                shard[block] = bit  # one shared number for all blocks that this worker alone holds
                alone += 1
            elif mask & bit:
                known += 1
                known_sum += block
            else:
                shard[block] = mask | bit
                if not mask & (mask - 1):
                    self._slot_of(mask).unique -= 1
        added = len(blocks) - known
        slot.blocks += added
        slot.unique += alone
        slot.digest = (slot.digest + sum(blocks) - known_sum) & _MASK
        return added

    def _delete(self, slot: _Slot, blocks: list[int]) -> int:
        shards, bit = self._shards, slot.bit
        removed = removed_sum = alone = 0
        for block in blocks:
            shard = shards[block >> _SHARD_SHIFT]
            mask = shard.get(block, 0)
            if not mask & bit:
                continue
            removed += 1
            removed_sum += block
            mask ^= bit
            if not mask:
                del shard[block]
                alone += 1
            elif mask & (mask - 1):
                shard[block] = mask
            else:
                other = self._slot_of(mask)
                other.unique += 1
                shard[block] = other.bit
        slot.blocks -= removed
        slot.unique -= alone
        slot.digest = (slot.digest - removed_sum) & _MASK
        return removed

    def _sweep_a_little(self) -> None:
        if self._retired_mask:
            self.sweep(_SWEPT_WITH_EACH_UPDATE)

    def _sweep_shard(self, number: int) -> None:
        shard, retired = self._shards[number], self._retired_mask
        size = len(shard)
        for block, mask in [item for item in shard.items() if item[1] & retired]:
            for bit in _bits(mask & retired):
                self._slot_of(bit).blocks -= 1
            rest = mask & ~retired
            if not rest:
                del shard[block]
            elif rest & (rest - 1):
                shard[block] = rest
            else:
                survivor = self._slot_of(rest)
                survivor.unique += 1
                shard[block] = survivor.bit
        if len(shard) < size // 2:
            self._shards[number] = dict(shard)  # a dictionary keeps its size when entries go; a copy does not
        for bit in _bits(retired):
            slot = self._slot_of(bit)
            if not slot.blocks:
                self._release(slot)


def _bits(mask: int) -> list[int]:
    bits = []
    while mask:
        bit = mask & -mask
        bits.append(bit)
        mask ^= bit
    return bits


def _as_list(blocks: Blocks) -> list[int]:
    if isinstance(blocks, np.ndarray):
        values: list[int] = blocks.tolist()
        return values
    return blocks if isinstance(blocks, list) else list[Any](blocks)
