"""Prometheus metrics, read from the sidecar's own state at each scrape."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvrouting_sidecar.rank import Rank
from kvrouting_sidecar.router_streams import StreamStatus
from kvrouting_sidecar.sidecar import Sidecar

_PREFIX = "kvrouting_sidecar"


def build_registry(sidecar: Sidecar) -> CollectorRegistry:
    """A registry of its own, so that two sidecars in one process do not meet."""
    registry = CollectorRegistry()
    registry.register(SidecarCollector(sidecar))
    return registry


class SidecarCollector(Collector):
    """What the sidecar knows, in Prometheus' terms."""

    def __init__(self, sidecar: Sidecar) -> None:
        self._sidecar = sidecar

    def describe(self) -> list[Metric]:
        """Nothing before the first scrape: the ranks are not known yet."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All families."""
        yield from _of_ranks(self._sidecar.ranks)
        yield from _of_streams(self._sidecar.streams.statuses())
        yield from _of_process(self._sidecar)


def _of_process(sidecar: Sidecar) -> Iterator[Metric]:
    engine = sidecar.engine
    reader = sidecar.reader
    yield GaugeMetricFamily(
        f"{_PREFIX}_engine_healthy",
        "1 if the engine's health page answers 200",
        value=float(engine is not None and engine.healthy),
    )
    yield GaugeMetricFamily(f"{_PREFIX}_draining", "1 once a drain was announced", value=float(sidecar.drain.announced))
    yield GaugeMetricFamily(
        f"{_PREFIX}_reader_alive",
        "1 while the thread that reads the engine's events runs",
        value=float(reader is not None and reader.alive),
    )


def _of_ranks(ranks: list[Rank]) -> Iterator[Metric]:
    counters, gauges = _Families(CounterMetricFamily, ["rank"]), _Families(GaugeMetricFamily, ["rank"])
    comparisons = CounterMetricFamily(
        f"{_PREFIX}_digest_comparisons",
        "Comparisons of the mirror with the engine's own count and digest",
        labels=["rank", "result"],
    )
    sources = GaugeMetricFamily(
        f"{_PREFIX}_mirror_source", "1 for how far the mirror may be trusted", labels=["rank", "source"]
    )
    for rank in ranks:
        number = str(rank.facts.identity.dp_rank)
        _count(counters, rank, number)
        _gauge(gauges, rank, number)
        _eviction(counters, gauges, rank, number)
        comparisons.add_metric([number, "ok"], rank.mirror.verification.matches)
        comparisons.add_metric([number, "failed"], rank.mirror.verification.mismatches)
        sources.add_metric([number, rank.source.value], 1)
    yield from counters.all()
    yield from gauges.all()
    yield comparisons
    yield sources


def _count(counters: _Families, rank: Rank, number: str) -> None:
    counts, published = rank.mirror.counts, rank.published
    dropped = published.queue.dropped_batches if published else 0
    malformed = published.malformed_messages if published else 0
    for name, text, value in (
        ("event_batches", "Event batches applied", counts.batches),
        ("duplicate_batches", "Event batches that were applied already", counts.duplicates),
        ("gaps", "Gaps in the engine's event stream", counts.gaps),
        ("replays", "Replays that the engine gave", counts.replays),
        ("replayed_batches", "Event batches that came by replay", counts.replayed_batches),
        ("engine_snapshots", "Snapshots of the engine's tree taken in", counts.snapshots),
        ("desyncs", "Times that the mirror could not be trusted any more", counts.desyncs),
        ("engine_restarts", "Engine processes after the first", counts.restarts),
        ("undecodable_batches", "Event batches that could not be read", counts.undecodable),
        ("dropped_batches", "Event batches dropped because the queue was full", dropped),
        ("malformed_messages", "Messages on the event socket that are no batches", malformed),
    ):
        counters.add(name, text, [number], value)


def _gauge(gauges: _Families, rank: Rank, number: str) -> None:
    waiting = rank.published.queue.waiting_bytes if rank.published else 0
    vitals = rank.vitals()
    rows: list[tuple[str, str, float]] = [
        ("mirror_blocks", "Routing blocks present in the mirror", rank.mirror.blocks),
        ("mirror_pages", "Live pages in the mirror", rank.mirror.pages),
        ("mirror_in_sync", "1 if the mirror may be shown", not rank.why_not_in_sync()),
        ("mirror_verified", "1 if the latest comparison with the engine held", vitals.verified),
        ("events_flowing", "1 if the engine's events arrive", vitals.events_flowing),
        ("event_queue_bytes", "Event batches received and not yet read", waiting),
    ]
    required = rank.facts.required_eviction
    if required or vitals.eviction_live:
        live = not rank.why_eviction_is_not_proven(required) if required else True
        rows.append(("eviction_policy_live", "1 if the engine proves the policy that it must run, or any", live))
    if vitals.load is not None:
        stat = vitals.load.stat
        rows += [
            ("engine_running_requests", "Requests that the engine runs", stat.running_requests),
            ("engine_waiting_requests", "Requests that wait in the engine", stat.waiting_requests),
            ("engine_used_tokens", "Tokens in use in the engine's cache", stat.used_tokens),
            ("engine_waiting_uncached_tokens", "Tokens to prefill for waiting requests", stat.waiting_uncached_tokens),
            ("engine_load_age_seconds", "Since the engine's latest load report", vitals.load.age_s),
        ]
    for name, text, value in rows:
        gauges.add(name, text, [number], float(value))


def _eviction(counters: _Families, gauges: _Families, rank: Rank, number: str) -> None:
    """What the engine's policy reports of itself; a family that it does not report is absent."""
    state = rank.follower.latest_state if rank.follower else None
    if state is None:
        return
    told = state.eviction
    rows: list[tuple[_Families, str, str, float | None]] = [
        (counters, "eviction_evicted_tokens", "Tokens evicted by the engine", told.evicted_tokens),
        (counters, "eviction_own_loaded_tokens", "Tokens that the cache had to load", told.own_loaded_tokens),
        (
            counters,
            "eviction_ghost_loaded_tokens",
            "Tokens that RLT would have had to load for the same requests",
            told.ghost_loaded_tokens,
        ),
        (counters, "eviction_safe_entries", "Times that safe mode began", told.safe_entries),
        (gauges, "eviction_safe_mode", "1 while only what RLT would not hold is evicted", told.safe_mode),
        (gauges, "eviction_phi_tokens", "How far the cache is behind RLT; negative: ahead", told.phi_tokens),
        (gauges, "eviction_phi_limit_tokens", "Where safe mode begins", told.phi_limit_tokens),
        (gauges, "eviction_phi_bound_tokens", "What phi never passes", told.phi_bound_tokens),
    ]
    for families, name, text, value in rows:
        if value is not None:
            families.add(name, text, [number], float(value))


def _of_streams(statuses: list[StreamStatus]) -> Iterator[Metric]:
    labels = ["router", "rank"]
    gauges, counters = _Families(GaugeMetricFamily, labels), _Families(CounterMetricFamily, labels)
    for status in statuses:
        values = [status.router, str(status.rank)]
        for name, text, value in (
            ("router_connected", "1 while the router has welcomed the worker", float(status.connected)),
            ("router_unacknowledged_messages", "Messages not acknowledged", status.unacknowledged_messages),
            ("router_pending_blocks", "Blocks that the session holds in memory", status.pending_blocks),
            ("router_lag_seconds", "Age of the oldest change not acknowledged", status.lag_s),
        ):
            gauges.add(name, text, values, value)
        for name, text, count in (
            ("router_messages", "Messages sent", status.sent_messages),
            ("router_snapshots", "Snapshots sent completely", status.sent_snapshots),
            ("router_connects", "Streams that the router welcomed", status.connects),
        ):
            counters.add(name, text, values, count)
    yield from gauges.all()
    yield from counters.all()


class _Families:
    """Metric families of one kind and label set, made on first use."""

    def __init__(self, kind: type[CounterMetricFamily] | type[GaugeMetricFamily], labels: list[str]) -> None:
        self._kind = kind
        self._labels = labels
        self._members: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}

    def add(self, name: str, text: str, values: list[str], value: float) -> None:
        family = self._members.get(name)
        if family is None:
            family = self._members[name] = self._kind(f"{_PREFIX}_{name}", text, labels=self._labels)
        family.add_metric(values, value)

    def all(self) -> Iterator[Metric]:
        yield from self._members.values()
