"""The router's Prometheus metrics."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_TTFT_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 16, 32, 64)
_E2E_S = (0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 16, 32, 64, 128, 300)
_FAST_S = (5e-5, 1e-4, 2e-4, 4e-4, 6e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 6.4e-2, 0.25, 1)


class RouterMetrics:
    """Each metric of the router that is counted as things happen. What is only looked up is added by `watch`."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._define_requests()
        self._define_tokens()
        self._define_sync()

    def _define_requests(self) -> None:
        r = self.registry
        self.requests = Counter(
            "kvrouting_router_requests", "Requests by surface and outcome", ["api", "outcome"], registry=r
        )
        self.responses = Counter(
            "kvrouting_router_responses", "Responses by surface and HTTP status", ["api", "status"], registry=r
        )
        self.refusals = Counter("kvrouting_router_refusals", "Requests refused by the policy", ["reason"], registry=r)
        self.retries = Counter("kvrouting_router_retries", "Attempts after a failed one", registry=r)
        self.failed_attempts = Counter(
            "kvrouting_router_failed_attempts", "Attempts that failed by the worker's fault", ["reason"], registry=r
        )
        self.first_byte_s = Histogram(
            "kvrouting_router_time_to_first_byte_seconds",
            "From a request's arrival to the first byte of its answer",
            buckets=_TTFT_S, registry=r,
        )  # fmt: skip
        self.end_to_end_s = Histogram(
            "kvrouting_router_end_to_end_seconds",
            "From a request's arrival to the end of its answer",
            buckets=_E2E_S, registry=r,
        )  # fmt: skip
        self.decision_s = Histogram(
            "kvrouting_router_decision_seconds",
            "One policy step for an arrival: match, estimate, choose, reserve",
            buckets=_FAST_S, registry=r,
        )  # fmt: skip
        self.queue_wait_s = Histogram(
            "kvrouting_router_queue_wait_seconds",
            "In the router's own queue, of each dispatched attempt; 0 if it went at once",
            buckets=_TTFT_S, registry=r,
        )  # fmt: skip
        self.tokenization_s = Histogram(
            "kvrouting_router_tokenization_seconds",
            "Template, tokenizer and hash of one request, waiting for a thread included",
            buckets=_FAST_S, registry=r,
        )  # fmt: skip
        self.rejected = Counter(
            "kvrouting_router_rejected_requests", "Requests that the router itself rejected", ["error"], registry=r
        )

    def _define_tokens(self) -> None:
        r = self.registry
        self.prompt_tokens = Counter("kvrouting_router_prompt_tokens", "Prompt tokens dispatched", registry=r)
        self.matched_tokens = Counter(
            "kvrouting_router_matched_tokens", "Prompt tokens that the chosen worker held by the index", registry=r
        )
        self.cached_tokens = Counter(
            "kvrouting_router_cached_tokens", "Prompt tokens that engines report as cached", registry=r
        )

    def _define_sync(self) -> None:
        r = self.registry
        self.resyncs = Counter("kvrouting_router_resyncs", "Snapshots asked for, by reason", ["reason"], registry=r)
        self.drifts = Counter("kvrouting_router_drifts", "Views found different from what they should be", registry=r)
        self.digest_checks = Counter(
            "kvrouting_router_digest_checks", "Heartbeats whose count and digest were compared", registry=r
        )
        self.audits = Counter(
            "kvrouting_router_audits", "Decisions whose lookup was repeated by the plain walk", registry=r
        )
        self.fenced = Counter(
            "kvrouting_router_fenced_messages", "Messages of streams or epochs that are gone", registry=r
        )
        self.handshakes_refused = Counter(
            "kvrouting_router_handshakes_refused", "Hellos that did not fit this pool", ["reason"], registry=r
        )
        self.sync_blocks = Counter(
            "kvrouting_router_sync_blocks", "Blocks received from sidecars", ["kind"], registry=r
        )

    def watch(self, collector: Collector) -> None:
        """Adds values that are looked up when the page is read."""
        self.registry.register(collector)

    def page(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)


def gauge(name: str, text: str, value: float) -> Metric:
    """One looked-up value."""
    return GaugeMetricFamily(f"kvrouting_router_{name}", text, value=value)


def labelled_gauge(name: str, text: str, labels: list[str]) -> GaugeMetricFamily:
    """A looked-up value for each of several things; `add_metric` fills it."""
    return GaugeMetricFamily(f"kvrouting_router_{name}", text, labels=labels)


__all__ = ["Gauge", "RouterMetrics", "gauge", "labelled_gauge"]
