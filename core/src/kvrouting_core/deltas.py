"""Radix deltas: how the set of routing blocks that a worker holds changes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Extend:
    """These blocks, each the prefix of the next, are present now.

    parent: the block before the first one; None: it starts a prompt.
    """

    parent: int | None
    blocks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Trim:
    """These blocks are no longer present. No block that needs one of them is present either."""

    blocks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Clear:
    """No block is present."""


Delta = Extend | Trim | Clear
