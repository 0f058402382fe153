"""What one sending of a request came to."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from kvrouting_core.routing.events import Outcome
from kvrouting_simulator.workloads.work_item import ReadyRequest


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """One sending. Times are the caller's clock in seconds.

    prompt_tokens, cached_tokens: as the endpoint reports them; None if it does not say.
    error: `kind: detail`, None if the whole answer came. cut: the answer had begun, or might have, when it broke off.
    """

    outcome: Outcome
    end_s: float
    first_token_s: float | None = None
    token_ids: array[int] = field(default_factory=lambda: array("I"))
    output_tokens: int = 0
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    worker: str | None = None
    error: str | None = None
    cut: bool = False


class Sender(Protocol):
    """Sends one request and reads its answer; every failure is an attempt, not an exception."""

    async def send(self, request: ReadyRequest, *, on_sent: Callable[[], None]) -> Attempt:
        """on_sent: called when the request goes out, after any wait for a free connection."""
