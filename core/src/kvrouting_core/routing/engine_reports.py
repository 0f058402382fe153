"""What the engines' load reports tell: others' load, how busy prefill is, how fast each worker really is.

The counters are cumulative since the engine's start; one that goes back is a restart, and counting starts anew.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from statistics import median

from kvrouting_core.routing.events import LoadReport

_BUSY_SHARE_MEMORY_MS = 30_000.0
_SPEED_MEMORY_MS = 8_000.0
# What each speed estimate weighs before any evidence, in ms of prefill: little evidence moves it little.
_SPEED_INERTIA_MS = 200.0
_LEAST_EVIDENCE_TOKENS = 500
# Workers whose speeds differ by less, on a log scale, are taken as equal: the noise is of that size.
_DEAD_BAND = 0.25
_SLOWEST, _FASTEST = 20.0, 0.05
# A count from an older report says nothing.
_REPORT_LIFETIME_MS = 10_000.0


class RecentPeak:
    """The largest value that a count had since a given time."""

    __slots__ = ("_falling",)

    def __init__(self) -> None:
        # (t, v), falling: the peak since any moment from t until the next entry's t is v.
        self._falling: deque[tuple[float, int]] = deque([(-math.inf, 0)])

    def record(self, value: int, *, now_ms: float) -> None:
        """The count is `value` from now on."""
        falling, start_ms = self._falling, now_ms
        while falling and falling[-1][1] <= value:
            start_ms = falling.pop()[0]
        falling.append((start_ms, value))

    def since(self, since_ms: float) -> int:
        """The peak since then, what it was at that moment included. What lies before is forgotten."""
        falling = self._falling
        while len(falling) > 1 and falling[1][0] <= since_ms:
            falling.popleft()
        return falling[0][1]


class EngineCounters:
    """Differences of one engine's two cumulative prefill counters."""

    __slots__ = ("_busy_us", "_reported_ms", "_tokens")

    def __init__(self) -> None:
        self._reported_ms: float | None = None
        self._busy_us = 0
        self._tokens = 0

    def is_stale(self, report: LoadReport) -> bool:
        """Whether a later report has been seen."""
        return self._reported_ms is not None and report.reported_ms <= self._reported_ms

    def went_back(self, report: LoadReport) -> bool:
        """Whether the engine has restarted since the last report."""
        return report.total_prefill_busy_us < self._busy_us or report.total_prefill_uncached_tokens < self._tokens

    def advance(self, report: LoadReport) -> tuple[float, float, int] | None:
        """Returns: ms passed, ms of prefill and uncached tokens since the last report; None for the first one."""
        before_ms, busy_us, tokens = self._reported_ms, self._busy_us, self._tokens
        self._reported_ms = report.reported_ms
        self._busy_us = report.total_prefill_busy_us
        self._tokens = report.total_prefill_uncached_tokens
        if before_ms is None:
            return None
        return report.reported_ms - before_ms, (self._busy_us - busy_us) / 1000, self._tokens - tokens


class MeasuredSpeed:
    """Prefill time of one worker over what its class prior says; above 1 is slower.

    Busy time and expected time are decayed sums that advance together: a ratio per report is destructive, because a
    batch's tokens and its time fall into different reports. Without evidence nothing moves, however long.
    """

    __slots__ = ("_busy_ms", "_expected_ms", "_passed_ms", "_tokens", "observations", "ratio", "sum_busy_ms",
                 "sum_expected_ms")  # fmt: skip

    def __init__(self) -> None:
        self.ratio = 1.0
        self.observations = 0
        self.sum_busy_ms = 0.0
        self.sum_expected_ms = 0.0
        self._forget_pending()

    def add(self, *, passed_ms: float, busy_ms: float, tokens: int, prior_ms_per_token: float) -> None:
        """Takes one report's differences."""
        self._passed_ms += passed_ms
        self._busy_ms += busy_ms
        self._expected_ms += tokens * prior_ms_per_token
        self._tokens += tokens
        if self._tokens <= _LEAST_EVIDENCE_TOKENS:
            return
        kept = math.exp(-self._passed_ms / _SPEED_MEMORY_MS)
        self.sum_busy_ms = self.sum_busy_ms * kept + self._busy_ms
        self.sum_expected_ms = self.sum_expected_ms * kept + self._expected_ms
        self._forget_pending()
        ratio = (self.sum_busy_ms + _SPEED_INERTIA_MS * self.ratio) / (self.sum_expected_ms + _SPEED_INERTIA_MS)
        self.ratio = min(_SLOWEST, max(_FASTEST, ratio))
        self.observations += 1

    def _forget_pending(self) -> None:
        self._passed_ms = self._busy_ms = self._expected_ms = 0.0
        self._tokens = 0


def pool_speed(measured: Iterable[MeasuredSpeed]) -> float:
    """Median ratio of the workers with evidence; 1 without any."""
    ratios = [speed.ratio for speed in measured if speed.observations]
    return median(ratios) if ratios else 1.0


def speed_factor(measured: MeasuredSpeed, pool: float) -> float:
    """f: the worker's own ratio if it stands out, else that of the pool."""
    if measured.observations and abs(math.log(measured.ratio / pool)) > _DEAD_BAND:
        return measured.ratio
    return pool


class BusyShare:
    """Share of time that a worker's engine spends in prefill: running mean over half a minute.

    A chunk counts when it ends. What is more than the time since the last report was worked before it, and is made up
    for in the reports that follow.
    """

    __slots__ = ("_ahead_ms", "_share")

    def __init__(self) -> None:
        self._share = 0.0
        self._ahead_ms = 0.0

    @property
    def value(self) -> float:
        """0..1."""
        return self._share

    def add(self, *, passed_ms: float, busy_ms: float) -> None:
        """Takes one report's differences."""
        if passed_ms > 0:
            worked_ms = busy_ms + self._ahead_ms
            self._ahead_ms = min(_BUSY_SHARE_MEMORY_MS, max(0.0, worked_ms - passed_ms))
            gain = 1 - math.exp(-passed_ms / _BUSY_SHARE_MEMORY_MS)
            self._share += gain * (min(1.0, worked_ms / passed_ms) - self._share)


class OthersLoad:
    """Requests on a worker that this router did not send, from the engine's report less the most that ours can be.

    requests: how many; they count while now < until_ms, that is not without a recent report.
    """

    __slots__ = ("_reported_ms", "_tokens", "requests", "until_ms")

    def __init__(self) -> None:
        self.requests = 0
        self.until_ms = -math.inf
        self._tokens = 0
        self._reported_ms = 0.0

    def replace(self, report: LoadReport, *, own_requests: int, own_tokens: int) -> None:
        """own_requests, own_tokens: the most that ours were since the report's time."""
        self.requests = max(0, report.waiting_requests + report.running_requests - own_requests)
        self._tokens = max(0, report.waiting_uncached_tokens - own_tokens)
        self._reported_ms = report.reported_ms
        counts = self.requests or self._tokens
        self.until_ms = report.reported_ms + _REPORT_LIFETIME_MS if counts else -math.inf

    def work_ms(self, *, now_ms: float, ms_per_token: float) -> float:
        """Their prefill work that waits, less the time since the report; 0 without a recent report."""
        if now_ms >= self.until_ms:
            return 0.0
        return max(0.0, self._tokens * ms_per_token - max(0.0, now_ms - self._reported_ms))
