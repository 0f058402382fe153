"""The figures of a run, against slow definitions."""

from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouting_core.routing.events import Outcome
from kvrouting_simulator.report import RequestRecord, summarise
from kvrouting_simulator.report.summary import percentile
from tests.fakes.request_records import random_records, record


def test_hit_rate_is_weighted_by_tokens_and_counts_completed_requests_only() -> None:
    summary = summarise(
        [
            record(prompt_tokens=100, cached_tokens=100),
            record(prompt_tokens=900, cached_tokens=0),
            record(prompt_tokens=500, cached_tokens=500, error="timeout: 60 s"),
        ]
    )
    assert summary.hit_rate == pytest.approx(0.1)


def test_latency_counts_from_the_due_time_whenever_it_was_sent() -> None:
    summary = summarise([record(arrival_ms=1000, latency_ms=400, sent_ms=1300)])
    assert summary.latency is not None
    assert summary.latency.p50 == 400
    assert summary.lateness is not None
    assert summary.lateness.maximum == 300


@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=60))
def test_percentile_is_the_inclusive_quantile(values: list[float]) -> None:
    values.sort()
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    for percent in (1, 50, 95, 99):
        assert percentile(values, percent) == pytest.approx(cuts[percent - 1], rel=1e-9, abs=1e-9)
    assert percentile(values, 0) == values[0]
    assert percentile(values, 100) == values[-1]


@pytest.mark.parametrize(("values", "percent"), [([], 50), ([1.0], 101), ([1.0], -1)])
def test_percentile_refuses_nonsense(values: list[float], percent: float) -> None:
    with pytest.raises(ValueError, match=r"value|percent"):
        percentile(values, percent)


def test_throughput_and_goodput_are_over_the_time_to_the_last_completion() -> None:
    records = [
        record("a", arrival_ms=0, ttft_ms=50, latency_ms=1000),
        record("b", arrival_ms=1000, ttft_ms=900, latency_ms=1000),
        record("c", arrival_ms=3000, ttft_ms=100, latency_ms=1000, output_tokens=8),
        record("late failure", arrival_ms=3000, latency_ms=90_000, error="timeout: 90 s"),
    ]
    summary = summarise(records, goodput_ttft_ms=100)
    assert summary.span_ms == 4000
    assert summary.throughput_per_s == pytest.approx(3 / 4)
    assert summary.goodput_per_s == pytest.approx(2 / 4)
    assert summary.output_tokens_per_s == pytest.approx(16 / 4)
    assert summarise(records, start_ms=-4000).throughput_per_s == pytest.approx(3 / 8)


def test_time_per_output_token_leaves_the_first_token_out() -> None:
    summary = summarise(
        [
            record("four", ttft_ms=100, latency_ms=400, output_tokens=4),
            record("one", ttft_ms=100, latency_ms=100, output_tokens=1),
        ]
    )
    assert summary.tpot is not None
    assert summary.tpot.mean == pytest.approx(100)


def test_an_idle_worker_makes_the_load_uneven() -> None:
    records = [record("a", prompt_tokens=300, cached_tokens=200), record("b", worker="engine-1", prompt_tokens=300)]
    assert summarise(records).imbalance == pytest.approx(300 / 200)
    with_idle = summarise(records, workers=["engine-0", "engine-1", "engine-2"])
    assert with_idle.imbalance == pytest.approx(300 / (400 / 3))
    assert [w.worker for w in with_idle.workers] == ["engine-0", "engine-1", "engine-2"]


def test_imbalance_is_of_busy_time_where_it_is_known() -> None:
    summary = summarise([record()], busy_ms={"engine-0": 3000.0, "engine-1": 1000.0})
    assert summary.imbalance == pytest.approx(1.5)
    assert summary.imbalance_of == "busy time"


def test_every_request_is_counted_once_and_by_kind() -> None:
    records = [
        record("ok", resubmissions=1),
        record("cut", error="stream_cut: worker gone"),
        record("cut too", error="stream_cut: eof"),
        record("refused", error="http_429: queue full", outcome=Outcome.REJECTED),
        record("left", error="interrupted", outcome=Outcome.CANCELLED, ttft_ms=None),
    ]
    summary = summarise(records)
    assert (summary.completed, summary.lost, summary.refused, summary.cancelled) == (1, 2, 1, 1)
    assert summary.requests == 5
    assert summary.resubmitted == 1
    assert summary.failures == {"http_429": 1, "interrupted": 1, "stream_cut": 2}


def test_nothing_completed_gives_no_distribution_and_no_rate() -> None:
    summary = summarise([record(error="connection: refused", ttft_ms=None, worker=None)], goodput_ttft_ms=500)
    assert summary.latency is None
    assert summary.ttft is None
    assert summary.hit_rate is None
    assert summary.imbalance is None
    assert summary.throughput_per_s == 0.0
    assert summary.goodput_per_s == 0.0
    assert summarise([]).requests == 0


@given(st.integers(0, 1000))
def test_workers_sum_to_the_run(seed: int) -> None:
    records = random_records(seed, count=40)
    summary = summarise(records)
    assert sum(w.completed for w in summary.workers) == summary.completed
    assert sum(w.prompt_tokens for w in summary.workers) == summary.prompt_tokens
    assert sum(w.cached_tokens for w in summary.workers) == summary.cached_tokens
    assert summary.requests == summary.completed + sum(summary.failures.values())


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"latency_ms": -1.0, "ttft_ms": None}, "-1.0"),
        ({"ttft_ms": 500.0, "latency_ms": 400.0}, "500.0"),
        ({"cached_tokens": 101}, "101"),
        ({"output_tokens": -3}, "-3"),
        ({"outcome": Outcome.FAILED}, "failed"),
        ({"error": "x", "outcome": Outcome.COMPLETED}, "'x'"),
        ({"latency_ms": math.inf}, "inf"),
    ],
)
def test_a_record_refuses_what_cannot_be(changes: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        record(**changes)  # type: ignore[arg-type]


def test_a_record_knows_its_kind_of_error() -> None:
    failed: RequestRecord = record(error="http_500: internal: deep", ttft_ms=None)
    assert failed.error_kind == "http_500"
    assert failed.ttft_ms is None
    assert failed.tpot_ms is None
    assert record().error_kind is None
