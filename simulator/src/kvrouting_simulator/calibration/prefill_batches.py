"""One worker's prefill batches, seen from outside: which requests got their first token together, and how long it took.

An engine prefills before it decodes, and takes all that waits into one batch as far as it fits. So a batch whose
requests all waited when the one before ended took the time between the two ends; and one that met an idle engine took
the time from its dispatch, with the way there and back. Of a batch that met a running decode step nobody knows when it
began: its length counts, its time does not.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvrouting_simulator.calibration.observations import Observation

# First tokens of one batch come within this: all engines' shortest batch takes longer.
_TOGETHER_MS = 4.0
# A request that came this shortly before a batch's end may have come after it.
_SURELY_BEFORE_MS = 3.0


class Start(enum.Enum):
    """What a batch began after."""

    BATCH = "after the batch before"
    IDLE = "on an idle engine"
    UNKNOWN = "within a decode step"


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillBatch:
    """new_tokens, token_pairs: sums over its requests. duration_ms: meaningless if the start is unknown."""

    start: Start
    ended_ms: float
    duration_ms: float
    new_tokens: int
    token_pairs: float


def prefill_batches(requests: Sequence[Observation]) -> list[PrefillBatch]:
    """All batches of one worker, in order."""
    ordered = sorted(requests, key=lambda r: r.first_token_ms)
    groups: list[list[Observation]] = []
    for request in ordered:
        if groups and request.first_token_ms - groups[-1][0].first_token_ms <= _TOGETHER_MS:
            groups[-1].append(request)
        else:
            groups.append([request])
    dispatched = np.array([r.dispatched_ms for r in ordered])
    ends = np.array([r.end_ms for r in ordered])
    vague = [(r.dispatched_ms, r.end_ms) for r in ordered if not r.sound]
    batches: list[PrefillBatch] = []
    before_ms = -np.inf
    for group in groups:
        first_ms = min(r.dispatched_ms for r in group)
        ended_ms = group[0].first_token_ms
        busy = bool(np.any((dispatched < first_ms) & (ends > first_ms)))
        start, began_ms = _start(group, before_ms=before_ms, busy=busy)
        if any(begin < ended_ms and end > began_ms for begin, end in vague):
            start = Start.UNKNOWN
        batches.append(
            PrefillBatch(
                start=start,
                ended_ms=ended_ms,
                duration_ms=ended_ms - began_ms,
                new_tokens=sum(r.new_tokens for r in group),
                token_pairs=sum(r.token_pairs for r in group),
            )
        )
        before_ms = group[-1].first_token_ms
    return batches


def _start(group: Sequence[Observation], *, before_ms: float, busy: bool) -> tuple[Start, float]:
    first_ms = min(r.dispatched_ms for r in group)
    last_ms = max(r.dispatched_ms for r in group)
    if last_ms < before_ms - _SURELY_BEFORE_MS:
        return Start.BATCH, before_ms
    if not busy and last_ms - first_ms < 1.0:
        return Start.IDLE, first_ms
    return Start.UNKNOWN, first_ms
