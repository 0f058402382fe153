"""When failed attempts speak against a worker, and when it is tried again."""

from __future__ import annotations

from kvrouting_router.options import BreakerOptions


class Breaker:
    """Opens after some failures in a row; timed probes close it. Times are seconds on the caller's clock.

    Only failures by the worker's fault are told to it, so a storm of bad requests (4xx) cannot open it.
    """

    def __init__(self, options: BreakerOptions) -> None:
        self._options = options
        self._failures = 0
        self._last_failure = ""
        self._probe_at_s: float | None = None
        self._pause_s = options.probe_s

    @property
    def is_open(self) -> bool:
        """The worker should not be chosen."""
        return self._probe_at_s is not None

    @property
    def reason(self) -> str:
        """Why it is open."""
        return f"{self._failures} attempts in a row failed, the last one: {self._last_failure}"

    def failed(self, reason: str, *, now_s: float) -> None:
        """An attempt failed by the worker's fault."""
        self._failures += 1
        self._last_failure = reason
        if self._probe_at_s is None and self._failures >= self._options.failures:
            self._probe_at_s = now_s + self._pause_s

    def succeeded(self) -> None:
        """The worker answered a request: the row of failures ends, and the next pause is short again."""
        self._failures = 0
        self._pause_s = self._options.probe_s
        self._probe_at_s = None

    def probe_is_due(self, *, now_s: float) -> bool:
        """Whether it is time to ask the engine."""
        return self._probe_at_s is not None and now_s >= self._probe_at_s

    def probed(self, *, healthy: bool, now_s: float) -> None:
        """The probe's answer. A healthy one closes the breaker; the pause grows until a real request succeeds."""
        self._pause_s = min(2 * self._pause_s, self._options.max_probe_s)
        if healthy:
            self._failures = 0
            self._probe_at_s = None
        else:
            self._probe_at_s = now_s + self._pause_s
