"""What the routers of a pool say of its workers, gathered by pod."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

import msgspec

Mirror = Literal["exact", "partial", "approximate"]

# Worst first: what is said of several ranks and by several routers is the worst of it.
_STATES = ("gone", "suspect", "draining", "syncing", "live")
_MIRRORS: tuple[Mirror, ...] = ("approximate", "partial", "exact")


class _Eviction(msgspec.Struct, frozen=True):
    name: str
    live: bool


class RankView(msgspec.Struct, frozen=True):
    """One entry of a router's `/workers` page; None and defaults where the router does not know."""

    worker: str
    state: str
    reason: str = ""
    epoch: str = ""
    mirror: str = "approximate"
    unique_blocks: int = 0
    cached_tokens: int | None = None
    capacity_tokens: int = 0
    in_flight: int = 0
    sync_lag_s: float = 0.0
    eviction_policy: _Eviction | None = None
    events_flowing: bool | None = None


class _Page(msgspec.Struct, frozen=True):
    workers: list[RankView]


class UnreadablePageError(ValueError):
    """A router's page is not what it should be."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerReport:
    """One worker pod in the eyes of the routers. eviction_live, events_flowing: None before its first heartbeat."""

    state: str
    reason: str
    epoch: str
    mirror: Mirror
    cached_tokens: int | None
    unique_cached_tokens: int
    capacity_tokens: int
    in_flight: int
    sync_lag_s: float
    eviction_policy: str | None
    eviction_live: bool | None
    events_flowing: bool | None


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolReport:
    """workers: by pod uid. silent: why each router that was asked did not answer."""

    answered: int = 0
    silent: tuple[str, ...] = ()
    workers: Mapping[str, WorkerReport] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterAddress:
    """pod: its name, for messages. url: of its HTTP port. api_key: what it asks clients for, if anything."""

    pod: str
    url: str
    api_key: str | None = None


class ReportFetcher(Protocol):
    """Asks routers for their `/workers` page."""

    def __call__(self, routers: Iterable[RouterAddress], *, block_size_tokens: int) -> PoolReport:
        """Never raises for a router that does not answer: the report says so."""


def read_page(body: bytes) -> list[RankView]:
    """Raises: UnreadablePageError."""
    try:
        return msgspec.json.decode(body, type=_Page).workers
    except msgspec.DecodeError as error:
        raise UnreadablePageError(f"the page of workers is unreadable: {error}") from error


def gathered(pages: Iterable[list[RankView]], *, block_size_tokens: int) -> dict[str, WorkerReport]:
    """Pod uid → report over all ranks and routers. A worker is called `<pod uid>/<rank>`."""
    by_pod: dict[str, list[list[RankView]]] = {}
    for page in pages:
        ranks: dict[str, list[RankView]] = {}
        for view in page:
            ranks.setdefault(view.worker.rsplit("/", 1)[0], []).append(view)
        for uid, views in ranks.items():
            by_pod.setdefault(uid, []).append(views)
    return {uid: _report(pages_of_pod, block_size_tokens) for uid, pages_of_pod in by_pod.items()}


def _report(pages: list[list[RankView]], block_size_tokens: int) -> WorkerReport:
    """pages: of each router that knows the pod, its ranks. Requests add up over routers, the rest is the same."""
    every = [view for page in pages for view in page]
    one = max(pages, key=len)
    worst = min(every, key=lambda view: _STATES.index(view.state) if view.state in _STATES else 0)
    mirrors = [view.mirror for view in every]
    evictions = [view.eviction_policy for view in every if view.eviction_policy is not None]
    cached = [view.cached_tokens for view in one if view.cached_tokens is not None]
    flowing = [view.events_flowing for view in every if view.events_flowing is not None]
    return WorkerReport(
        state=worst.state,
        reason=worst.reason,
        epoch=",".join(sorted({view.epoch for view in one})),
        mirror=next((m for m in _MIRRORS if m in mirrors), "approximate"),
        cached_tokens=sum(cached) if cached else None,
        unique_cached_tokens=sum(view.unique_blocks for view in one) * block_size_tokens,
        capacity_tokens=sum(view.capacity_tokens for view in one),
        in_flight=sum(view.in_flight for view in every),
        sync_lag_s=round(max(view.sync_lag_s for view in every), 1),
        eviction_policy=_first_but(evictions),
        eviction_live=all(e.live for e in evictions) if evictions else None,
        events_flowing=all(flowing) if flowing else None,
    )


def _first_but(evictions: list[_Eviction]) -> str | None:
    """The policy that is not live, if there is one."""
    ordered = sorted(evictions, key=lambda eviction: eviction.live)
    return ordered[0].name if ordered else None
