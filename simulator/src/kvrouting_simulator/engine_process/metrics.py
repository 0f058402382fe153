"""Prometheus metrics under SGLang's names, and a few of the simulation's own under `kvrouting_engine_`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvrouting_simulator.engine_process.generation import Generation
from kvrouting_simulator.engine_process.rank import Rank

# SGLang's default buckets.
_FIRST_TOKEN_S = (0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400)
_END_TO_END_S = (*_FIRST_TOKEN_S, 600, 1200, 1800, 2400)
_LATE_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2, 5)


class EngineMetrics:
    """Observes what ends, and reads the ranks when it is scraped."""

    def __init__(self, *, served_model: str) -> None:
        self._registry = CollectorRegistry()
        self._labels = {"model_name": served_model, "engine_type": "unified"}
        names = list(self._labels)
        self._first_token = Histogram(
            "sglang:time_to_first_token_seconds",
            "Time to first token in seconds.",
            names,
            buckets=_FIRST_TOKEN_S,
            registry=self._registry,
        ).labels(**self._labels)
        self._end_to_end = Histogram(
            "sglang:e2e_request_latency_seconds",
            "End-to-end request latency in seconds.",
            names,
            buckets=_END_TO_END_S,
            registry=self._registry,
        ).labels(**self._labels)
        self._late = Histogram(
            "kvrouting_engine_step_lateness_seconds",
            "From a step's deadline until the process saw it.",
            names,
            buckets=_LATE_S,
            registry=self._registry,
        ).labels(**self._labels)
        self._requests = 0
        self._aborted = 0

    def watch(self, ranks: Sequence[Rank]) -> None:
        """Reads these ranks at each scrape."""
        self._registry.register(_RankCollector(self, ranks))

    def late(self, seconds: float) -> None:
        """A step was seen so late."""
        self._late.observe(seconds)

    def ended(self, generation: Generation) -> None:
        """An answer ended."""
        if generation.finish == "abort":
            self._aborted += 1
            return
        self._requests += 1
        if generation.first_token_s is not None and generation.ended_s is not None:
            self._first_token.observe(generation.first_token_s - generation.submitted_s)
            self._end_to_end.observe(generation.ended_s - generation.submitted_s)

    def exposition(self) -> bytes:
        """The text format."""
        return generate_latest(self._registry)

    @property
    def labels(self) -> dict[str, str]:
        """Those of every SGLang metric, without the rank."""
        return self._labels

    @property
    def requests(self) -> tuple[int, int]:
        """Answers that ended by themselves, answers that were aborted."""
        return self._requests, self._aborted


class _RankCollector(Collector):
    def __init__(self, metrics: EngineMetrics, ranks: Sequence[Rank]) -> None:
        self._metrics = metrics
        self._ranks = ranks

    def collect(self) -> Iterable[Metric]:
        yield from self._families(GaugeMetricFamily, _GAUGES, [_gauges(rank) for rank in self._ranks])
        yield from self._families(CounterMetricFamily, _COUNTERS, [_counters(rank) for rank in self._ranks])
        finished, aborted = self._metrics.requests
        for name, value in (("sglang:num_requests", finished), ("sglang:num_aborted_requests", aborted)):
            counter = CounterMetricFamily(name, "Requests that ended so.", labels=list(self._metrics.labels))
            counter.add_metric(list(self._metrics.labels.values()), value)
            yield counter

    def _families(
        self,
        kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
        documented: Mapping[str, str],
        ranks: Sequence[Sequence[float]],
    ) -> Iterable[Metric]:
        for position, (name, text) in enumerate(documented.items()):
            family = kind(name, text, labels=[*self._metrics.labels, "dp_rank"])
            for rank, values in zip(self._ranks, ranks, strict=True):
                family.add_metric([*self._metrics.labels.values(), str(rank.number)], values[position])
            yield family


_GAUGES = {
    "sglang:num_running_reqs": "The number of running requests.",
    "sglang:num_queue_reqs": "The number of requests in the waiting queue.",
    "sglang:num_used_tokens": "The number of used tokens.",
    "sglang:token_usage": "The token usage.",
    "sglang:cache_hit_rate": "Cached prompt tokens over prompt tokens since the start.",
    "sglang:max_total_num_tokens": "Capacity of the KV cache in tokens.",
    "sglang:page_size": "Page size of the KV cache in tokens.",
}
_COUNTERS = {
    "sglang:prompt_tokens": "Number of prompt tokens of admitted requests.",
    "sglang:generation_tokens": "Number of generation tokens processed.",
    "sglang:cached_tokens": "Number of cached prompt tokens.",
    "sglang:num_retracted_requests": "Number of retracted requests.",
    "sglang:evicted_tokens": "Tokens evicted from the KV cache.",
    "kvrouting_engine_steps": "Scheduler steps that ended.",
    "kvrouting_engine_busy_seconds": "Real time in steps.",
    "kvrouting_engine_lost_seconds": "Real time lost because the process stood still.",
    "kvrouting_engine_event_batches": "KV event batches.",
    "kvrouting_engine_blocked_event_batches": "Batches that found the event queue full and held the scheduler up.",
}


def _gauges(rank: Rank) -> Sequence[float]:
    """The values of _GAUGES, in their order."""
    load = rank.load()
    hits = load.total_cached_tokens / load.total_prompt_tokens if load.total_prompt_tokens else 0.0
    return (
        load.running_requests,
        load.waiting_requests,
        load.used_tokens,
        load.used_tokens / load.max_total_tokens,
        hits,
        load.max_total_tokens,
        rank.page_size,
    )


def _counters(rank: Rank) -> Sequence[float]:
    """The values of _COUNTERS, in their order."""
    load = rank.load()
    return (
        load.total_prompt_tokens,
        load.total_output_tokens,
        load.total_cached_tokens,
        load.total_retractions,
        rank.evicted_tokens,
        rank.log.steps,
        rank.busy_s,
        rank.lost_s,
        rank.event_batches,
        rank.blocked_batches,
    )
