"""What a mirror asks, counts and tells: the words between it and whoever drives it."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Protocol

from kvrouting_core.deltas import Delta


class Source(enum.Enum):
    """How far the mirror may be trusted."""

    EXACT = "exact"
    PARTIAL = "partial"
    APPROXIMATE = "approximate"


@dataclass(frozen=True, slots=True)
class NeedIdentity:
    """Which process speaks?"""

    reason: str


@dataclass(frozen=True, slots=True)
class NeedReplay:
    """The batches from `first` on."""

    first: int
    reason: str


@dataclass(frozen=True, slots=True)
class NeedSnapshot:
    """The engine's tree."""

    reason: str


Need = NeedIdentity | NeedReplay | NeedSnapshot


@dataclass(frozen=True, kw_only=True, slots=True)
class EventSource:
    """An engine process, by the epoch of its state socket, or by a fingerprint of its start. None: it has none."""

    epoch: str | None
    fingerprint: str | None


class MirrorListener(Protocol):
    """Hears what the routers must be told."""

    def changed(self, deltas: list[Delta]) -> None:
        """The mirror changed, in this order."""

    def replaced(self) -> None:
        """The mirror was built anew."""

    def new_epoch(self) -> None:
        """Another engine process; what was told of the former is void."""


@dataclass(slots=True)
class MirrorCounts:
    """Cumulative, for metrics."""

    batches: int = 0
    duplicates: int = 0
    gaps: int = 0
    replays: int = 0
    replayed_batches: int = 0
    snapshots: int = 0
    desyncs: int = 0
    restarts: int = 0
    undecodable: int = 0
