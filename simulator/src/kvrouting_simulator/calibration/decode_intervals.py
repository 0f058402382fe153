"""One worker's decode steps, seen from outside: each answer's mean step, and the mean batch in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvrouting_simulator.calibration.observations import Observation
from kvrouting_simulator.calibration.prefill_batches import PrefillBatch, Start

Floats = NDArray[np.float64]

_FEWEST_STEPS = 3
# Of an answer that mostly waited for prefills the rest says little.
_LEAST_DECODE_SHARE = 0.2


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeInterval:
    """Means over the steps of one answer. requests, context_tokens: of the whole batch."""

    ended_ms: float
    steps: int
    step_ms: float
    requests: float
    context_tokens: float


def decode_intervals(
    requests: Sequence[Observation], batches: Sequence[PrefillBatch], prefill_ms: Callable[[PrefillBatch], float]
) -> list[DecodeInterval]:
    """The answers of one worker. prefill_ms: of a batch whose time was not seen; decoding stands still meanwhile."""
    decoding = _DecodeClock(batches, prefill_ms)
    ordered = sorted(requests, key=lambda r: r.first_token_ms)
    begin = np.array([r.first_token_ms for r in ordered])
    end = np.array([r.end_ms for r in ordered])
    prompt = np.array([r.prompt_tokens for r in ordered], dtype=np.float64)
    output = np.array([r.output_tokens for r in ordered], dtype=np.float64)
    whole = np.maximum(decoding.between(begin, end), 1e-9)
    vague = [(r.dispatched_ms, r.end_ms) for r in ordered if not r.sound]
    found = []
    for own, request in enumerate(ordered):
        steps = request.output_tokens - 1
        spent_ms = request.end_ms - request.first_token_ms
        if not request.sound or steps < _FEWEST_STEPS or whole[own] < _LEAST_DECODE_SHARE * spent_ms:
            continue
        if any(first < request.end_ms and last > request.first_token_ms for first, last in vague):
            continue
        low, high = np.maximum(begin, begin[own]), np.minimum(end, end[own])
        high = np.maximum(low, high)
        share = decoding.between(low, high) / whole[own]
        progress = decoding.between(begin, (low + high) / 2) / whole
        context = prompt + output * np.clip(progress, 0, 1)
        found.append(
            DecodeInterval(
                ended_ms=request.end_ms,
                steps=steps,
                step_ms=float(whole[own]) / steps,
                requests=float(share.sum()),
                context_tokens=float((share * context).sum()),
            )
        )
    return found


class _DecodeClock:
    """Time that is left for decoding: it stands still during prefill batches."""

    def __init__(self, batches: Sequence[PrefillBatch], prefill_ms: Callable[[PrefillBatch], float]) -> None:
        moments, totals = [0.0], [0.0]
        for batch in batches:
            took_ms = prefill_ms(batch) if batch.start is Start.UNKNOWN else batch.duration_ms
            begin_ms = max(batch.ended_ms - took_ms, moments[-1])
            moments += [begin_ms, max(begin_ms, batch.ended_ms)]
            totals += [totals[-1], totals[-1] + moments[-1] - begin_ms]
        self._moments, self._totals = np.array(moments), np.array(totals)

    def between(self, begin: Floats, end: Floats) -> Floats:
        """Decode time from begin to end, element by element."""
        stood = np.interp(end, self._moments, self._totals) - np.interp(begin, self._moments, self._totals)
        return np.asarray(end - begin - stood)
