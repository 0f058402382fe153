"""The figures of one run, computed from its request records alone."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvrouting_core.routing.events import Outcome
from kvrouting_simulator.report.records import RequestRecord

PERCENTILE_DEFINITION = (
    "Percentiles interpolate linearly between the two closest ranks, rank = p/100·(n − 1) of the n sorted "
    "values; completed requests only."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Percentiles:
    """A distribution in ms: see `PERCENTILE_DEFINITION`."""

    p50: float
    p95: float
    p99: float
    mean: float
    maximum: float


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerLoad:
    """What one worker did in a run. busy_ms: time inside steps, as the engine counts it; None if unknown."""

    worker: str
    completed: int
    prompt_tokens: int
    cached_tokens: int
    busy_ms: float | None = None

    @property
    def uncached_tokens(self) -> int:
        """Prompt tokens it had to prefill."""
        return self.prompt_tokens - self.cached_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """The figures of one run.

    hit_rate: cached prompt tokens / prompt tokens of completed requests; None if nothing completed.
    latency, ttft, tpot: of completed requests; None if nothing completed (tpot: or nobody had two tokens).
    span_ms: last completion − start; 0.0 if nothing completed.
    throughput_per_s: completed requests / span; output_tokens_per_s alike.
    goodput_per_s: completed requests whose time to first token met the target / span; None without a target.
    imbalance: max / mean over workers of busy time or uncached prompt tokens (imbalance_of says which); None
        without workers.
    failures: requests that did not complete, by kind of error.
    lost: requests that got neither an answer nor an honest refusal (outcome `failed`).
    resubmitted: requests that their client sent again after a cut answer; they count from the first arrival.
    lateness: how late the client sent; None where there is no sending. A late generator measures itself.
    """

    requests: int
    completed: int
    lost: int
    refused: int
    cancelled: int
    resubmitted: int
    failures: Mapping[str, int]
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    hit_rate: float | None
    latency: Percentiles | None
    ttft: Percentiles | None
    tpot: Percentiles | None
    span_ms: float
    throughput_per_s: float
    output_tokens_per_s: float
    goodput_ttft_ms: float | None
    goodput_per_s: float | None
    imbalance: float | None
    imbalance_of: str
    workers: tuple[WorkerLoad, ...]
    lateness: Percentiles | None


def percentile(sorted_values: Sequence[float], percent: float) -> float:
    """Value at rank percent/100·(n − 1), interpolated linearly. Raises: ValueError if there is no value."""
    if not sorted_values:
        raise ValueError("no values: a percentile needs at least one")
    if not 0 <= percent <= 100:
        raise ValueError(f"percent must be within 0..100, got {percent}")
    rank = percent / 100 * (len(sorted_values) - 1)
    below = math.floor(rank)
    above = min(below + 1, len(sorted_values) - 1)
    low = sorted_values[below]
    return low + (rank - below) * (sorted_values[above] - low)


def percentiles(values: Iterable[float | None]) -> Percentiles | None:
    """Of the values that are not None; None if there is none."""
    known = sorted(v for v in values if v is not None)
    if not known:
        return None
    return Percentiles(
        p50=percentile(known, 50),
        p95=percentile(known, 95),
        p99=percentile(known, 99),
        mean=math.fsum(known) / len(known),
        maximum=known[-1],
    )


def summarise(
    records: Sequence[RequestRecord],
    *,
    start_ms: float = 0.0,
    goodput_ttft_ms: float | None = None,
    workers: Iterable[str] = (),
    busy_ms: Mapping[str, float] | None = None,
) -> Summary:
    """The figures of a run.

    start_ms: begin of the run on the records' clock.
    goodput_ttft_ms: target for the time to first token.
    workers: the pool, so that one that served nothing counts as idle; those that records name are added.
    busy_ms: busy time by worker; without it the imbalance is that of uncached prompt tokens.
    """
    completed = [r for r in records if r.completed]
    span_ms = max((r.end_ms for r in completed), default=start_ms) - start_ms
    loads = _worker_loads(completed, workers, busy_ms)
    outcomes = Counter(r.outcome for r in records)
    prompt_tokens, cached_tokens, output_tokens = _tokens(completed)
    return Summary(
        requests=len(records),
        completed=len(completed),
        lost=outcomes[Outcome.FAILED],
        refused=outcomes[Outcome.REJECTED],
        cancelled=outcomes[Outcome.CANCELLED],
        resubmitted=sum(1 for r in records if r.resubmissions),
        failures=_failures(records),
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
        output_tokens=output_tokens,
        hit_rate=cached_tokens / prompt_tokens if prompt_tokens else None,
        latency=percentiles(r.latency_ms for r in completed),
        ttft=percentiles(r.ttft_ms for r in completed),
        tpot=percentiles(r.tpot_ms for r in completed),
        span_ms=span_ms,
        throughput_per_s=_per_second(len(completed), span_ms),
        output_tokens_per_s=_per_second(output_tokens, span_ms),
        goodput_ttft_ms=goodput_ttft_ms,
        goodput_per_s=_goodput(completed, span_ms, goodput_ttft_ms),
        imbalance=_imbalance(loads, by_busy_time=busy_ms is not None),
        imbalance_of="uncached prompt tokens" if busy_ms is None else "busy time",
        workers=loads,
        lateness=percentiles(r.lateness_ms for r in records),
    )


def _tokens(records: Sequence[RequestRecord]) -> tuple[int, int, int]:
    return (
        sum(r.prompt_tokens for r in records),
        sum(r.cached_tokens for r in records),
        sum(r.output_tokens for r in records),
    )


def _failures(records: Sequence[RequestRecord]) -> dict[str, int]:
    return dict(sorted(Counter(r.error_kind or "" for r in records if not r.completed).items()))


def _per_second(count: int, span_ms: float) -> float:
    return count / span_ms * 1000 if span_ms > 0 else 0.0


def _goodput(completed: Sequence[RequestRecord], span_ms: float, target_ms: float | None) -> float | None:
    if target_ms is None:
        return None
    return _per_second(sum(1 for r in completed if r.ttft_ms is not None and r.ttft_ms <= target_ms), span_ms)


def _worker_loads(
    completed: Sequence[RequestRecord], workers: Iterable[str], busy_ms: Mapping[str, float] | None
) -> tuple[WorkerLoad, ...]:
    names = {*workers, *(busy_ms or {}), *(r.worker for r in completed if r.worker is not None)}
    requests: Counter[str] = Counter()
    prompt: Counter[str] = Counter()
    cached: Counter[str] = Counter()
    for record in completed:
        if record.worker is not None:
            requests[record.worker] += 1
            prompt[record.worker] += record.prompt_tokens
            cached[record.worker] += record.cached_tokens
    return tuple(
        WorkerLoad(
            worker=name,
            completed=requests[name],
            prompt_tokens=prompt[name],
            cached_tokens=cached[name],
            busy_ms=None if busy_ms is None else busy_ms.get(name, 0.0),
        )
        for name in sorted(names)
    )


def _imbalance(loads: Sequence[WorkerLoad], *, by_busy_time: bool) -> float | None:
    shares = [(w.busy_ms or 0.0) if by_busy_time else float(w.uncached_tokens) for w in loads]
    total = math.fsum(shares)
    return max(shares) * len(shares) / total if total > 0 else None
