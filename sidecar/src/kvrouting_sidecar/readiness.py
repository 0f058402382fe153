"""Ready, or why not: each condition with its reason."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvrouting_sidecar.rank import Rank
from kvrouting_sidecar.router_streams import StreamStatus


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One condition. reason: why it does not hold, empty if it does. required: without it the worker is not ready."""

    name: str
    reason: str
    required: bool = True

    @property
    def holds(self) -> bool:
        return not self.reason


def readiness(
    *,
    engine_known: bool,
    engine_trouble: str,
    engine_healthy: bool,
    engine_url: str,
    ranks: Sequence[Rank],
    streams: Sequence[StreamStatus],
    require_eviction: str | None,
    draining: bool,
) -> list[Check]:
    """All conditions. That a router is there is none of them: workers and routers may start in any order. But a worker
    that every router there is has refused will never get a request, and must not be taken for ready.
    """
    unknown = "" if engine_known else f"the engine at {engine_url} has not described itself yet"
    if unknown and engine_trouble:
        unknown += f": {engine_trouble}"
    health = "" if engine_healthy else f"{engine_url}/health does not answer 200"
    checks = [
        Check(name="engine_known", reason=unknown),
        Check(name="engine_healthy", reason=health),
        Check(name="events_flowing", reason=unknown or _of_ranks(ranks, Rank.why_events_do_not_flow)),
        Check(name="mirror_in_sync", reason=unknown or _of_ranks(ranks, Rank.why_not_in_sync)),
    ]
    if require_eviction is not None:
        required = require_eviction
        reason = _of_ranks(ranks, lambda rank: rank.why_eviction_is_not_proven(required))
        checks.append(Check(name="eviction_policy_live", reason=unknown or reason))
    checks.append(Check(name="not_refused", reason=_refused_by_all(streams)))
    checks.append(Check(name="router_connected", reason=_no_router(streams), required=False))
    checks.append(Check(name="not_draining", reason="the worker drains" if draining else "", required=False))
    return checks


def _of_ranks(ranks: Sequence[Rank], why_not: Callable[[Rank], str]) -> str:
    found = [(rank.facts.identity.dp_rank, why_not(rank)) for rank in ranks]
    if len(ranks) == 1:
        return found[0][1]
    return "; ".join(f"rank {number}: {reason}" for number, reason in found if reason)


def _refused_by_all(streams: Sequence[StreamStatus]) -> str:
    """Empty unless some rank is refused by every router."""
    ranks = dict.fromkeys(stream.rank for stream in streams)
    refused = [
        stream
        for rank in ranks
        if all(stream.refusal for stream in streams if stream.rank == rank)
        for stream in streams
        if stream.rank == rank
    ]
    reasons = dict.fromkeys(f"{stream.router}: {stream.refusal}" for stream in refused)
    return f"every router refuses this worker ({'; '.join(reasons)})" if reasons else ""


def _no_router(streams: Sequence[StreamStatus]) -> str:
    if any(stream.connected for stream in streams):
        return ""
    errors = [f"{stream.router}: {stream.last_error}" for stream in streams if stream.last_error]
    return "no router is connected" + (f" ({'; '.join(errors)})" if errors else "")
