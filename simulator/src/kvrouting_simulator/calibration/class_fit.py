"""The step times of a worker class from observations: prefill first, then decode with what prefill took out of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass

import numpy as np
from numpy.typing import NDArray

from kvrouting_core.service_time import StepTimes
from kvrouting_simulator.calibration.decode_intervals import DecodeInterval, decode_intervals
from kvrouting_simulator.calibration.observations import Observation
from kvrouting_simulator.calibration.prefill_batches import PrefillBatch, Start, prefill_batches
from kvrouting_simulator.calibration.robust_fit import RobustFit, robust_fit, robust_loss

Floats = NDArray[np.float64]

FEWEST_ROWS = 30
_LEAST_SPREAD = 2.0
_FLOORS = 12
_HIGHEST_FLOOR = 0.5  # quantile of the batches' new tokens: enough must be left above it to tell the slope
_STEPS_THAT_COUNT = 50


class CalibrationError(ValueError):
    """The observations do not tell the coefficients; the message says what is missing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Error:
    """Of predictions, relative to what was measured. median: of absolute values. bias: median, positive: too long."""

    median: float
    bias: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """times and their standard errors (bootstrap), by coefficient; w, the floor, has none.

    The times are what a router sees: c0 holds the way to the engine and back.
    """

    times: StepTimes
    standard_errors: Mapping[str, float]
    batches: Sequence[PrefillBatch]
    intervals: Sequence[DecodeInterval]


def calibrate(observations: Iterable[Observation], *, seed: int = 1) -> Calibration:
    """Fits all workers' observations as those of one class. seed: of the bootstrap.

    Raises: CalibrationError.
    """
    workers: dict[str, list[Observation]] = defaultdict(list)
    # In an order of their own, so that the same requests give the same bytes.
    for observation in sorted(observations, key=astuple):
        workers[observation.worker].append(observation)
    batches = {worker: prefill_batches(requests) for worker, requests in workers.items()}
    seen = [batch for found in batches.values() for batch in found if batch.start is not Start.UNKNOWN]
    prefill = _fit_prefill(seen, seed=seed)
    intervals = [
        interval
        for worker, requests in workers.items()
        for interval in decode_intervals(requests, batches[worker], prefill.batch_ms)
    ]
    decode = _fit_decode(intervals, seed=seed)
    d0, d1, d2 = (float(value) for value in decode.coefficients)
    times = StepTimes(
        prefill_overhead_ms=prefill.overhead_ms,
        prefill_floor_ms=prefill.per_token_ms * prefill.floor_tokens,
        prefill_ms_per_token=prefill.per_token_ms,
        attention_ms_per_token_pair=prefill.per_pair_ms,
        decode_overhead_ms=d0,
        decode_overhead_alone_ms=d0,
        decode_ms_per_context_token=d1,
        decode_ms_per_request=d2,
    )
    names = ("decode_overhead_ms", "decode_ms_per_context_token", "decode_ms_per_request")
    errors = dict(zip(names, map(float, decode.standard_errors), strict=True))
    return Calibration(
        times=times,
        standard_errors={**prefill.standard_errors, **errors},
        batches=sorted(seen, key=lambda batch: batch.ended_ms),
        intervals=sorted(intervals, key=lambda interval: interval.ended_ms),
    )


def prefill_error(times: StepTimes, batches: Sequence[PrefillBatch]) -> Error:
    """Of the batches' durations as these times predict them."""
    predicted = [_batch_ms(times, batch) for batch in batches]
    return _error(predicted, [batch.duration_ms for batch in batches])


def decode_error(times: StepTimes, intervals: Sequence[DecodeInterval]) -> Error:
    """Of the mean steps as these times predict them."""
    predicted = [times.decode_ms(s.requests, s.context_tokens) for s in intervals]
    return _error(predicted, [s.step_ms for s in intervals])


def _error(predicted: Sequence[float], measured: Sequence[float]) -> Error:
    relative = (np.array(predicted) - np.array(measured)) / np.maximum(np.array(measured), 1e-3)
    return Error(median=float(np.median(np.abs(relative))), bias=float(np.median(relative)))


def _batch_ms(times: StepTimes, batch: PrefillBatch) -> float:
    """As `StepTimes.prefill_ms`, from the sums."""
    slope_ms = max(times.prefill_floor_ms, times.prefill_ms_per_token * batch.new_tokens)
    return times.prefill_overhead_ms + slope_ms + times.attention_ms_per_token_pair * batch.token_pairs


@dataclass(frozen=True, kw_only=True, slots=True)
class _PrefillFit:
    overhead_ms: float
    per_token_ms: float
    per_pair_ms: float
    floor_tokens: float
    standard_errors: Mapping[str, float]

    def batch_ms(self, batch: PrefillBatch) -> float:
        """Predicted duration."""
        new = max(self.floor_tokens, batch.new_tokens)
        return self.overhead_ms + self.per_token_ms * new + self.per_pair_ms * batch.token_pairs


def _fit_prefill(batches: Sequence[PrefillBatch], *, seed: int) -> _PrefillFit:
    """`T = c0 + max(w, a·Σn) + b·Σ pairs`: linear once it is known below how many tokens the floor w holds."""
    if len(batches) < FEWEST_ROWS:
        raise CalibrationError(
            f"only {len(batches)} prefill batches began at a known moment, {FEWEST_ROWS} are needed: send more "
            "requests, and some of them one at a time"
        )
    new = np.array([batch.new_tokens for batch in batches], dtype=np.float64)
    low, high = np.quantile(new, (0.05, 0.95))
    if high < _LEAST_SPREAD * low:
        raise CalibrationError(
            f"nine of ten prefill batches have {low:.0f} to {high:.0f} new tokens: send prompts of lengths that "
            "differ by more"
        )
    target = np.array([batch.duration_ms for batch in batches])
    pairs = np.array([batch.token_pairs for batch in batches])
    weights = 1 / (target + np.median(target)) ** 2

    def design(floor: float) -> Floats:
        return np.column_stack([np.ones(len(new)), np.maximum(floor, new), pairs])

    def best(floors: Sequence[float] | Floats) -> int:
        return int(np.argmin([robust_loss(design(tokens), target, weights) for tokens in floors]))

    coarse = [0.0, *np.unique(np.quantile(new, np.linspace(0, _HIGHEST_FLOOR, _FLOORS)))]
    place = best(coarse)
    # It lies between the neighbours of the best of the sizes that were seen.
    fine = np.linspace(coarse[max(0, place - 1)], coarse[min(len(coarse) - 1, place + 1)], _FLOORS)
    floor = fine[best(fine)]
    fit = robust_fit(design(floor), target, weights, seed=seed)
    return _prefill_fit(fit, floor=float(floor))


def _prefill_fit(fit: RobustFit, *, floor: float) -> _PrefillFit:
    overhead, per_token, per_pair = (float(value) for value in fit.coefficients)
    if not per_token > 0:
        raise CalibrationError("prefill takes no longer for more tokens: these are not the times of one kind of worker")
    names = ("prefill_overhead_ms", "prefill_ms_per_token", "attention_ms_per_token_pair")
    return _PrefillFit(
        overhead_ms=overhead,
        per_token_ms=per_token,
        per_pair_ms=per_pair,
        floor_tokens=floor,
        standard_errors=dict(zip(names, map(float, fit.standard_errors), strict=True)),
    )


def _fit_decode(intervals: Sequence[DecodeInterval], *, seed: int) -> RobustFit:
    """`T = d0 + d1·C + d2·B`, over the means of each answer."""
    if len(intervals) < FEWEST_ROWS:
        raise CalibrationError(
            f"only {len(intervals)} answers have several tokens and a known course, {FEWEST_ROWS} are needed: ask for "
            "answers of more tokens, as streams"
        )
    design = np.array([[1.0, s.context_tokens, s.requests] for s in intervals])
    target = np.array([s.step_ms for s in intervals])
    weights = np.array([min(s.steps, _STEPS_THAT_COUNT) for s in intervals]) / (target + np.median(target)) ** 2
    return robust_fit(design, target, weights, seed=seed)
