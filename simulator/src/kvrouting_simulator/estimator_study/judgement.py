"""Predictions against what happened, in numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from sklearn.metrics import mean_absolute_error, median_absolute_error, r2_score

from kvrouting_simulator.estimator_study.recorded_run import RecordedRun, undisturbed_ms

Floats = NDArray[np.float64]
DECILES = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class Decile:
    """A tenth of the requests, by what was predicted for them; means in ms."""

    predicted_ms: float
    happened_ms: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Accuracy:
    """Of the time that was predicted on the chosen worker, from the decision on. Errors in ms; bias: mean, positive
    where too long was predicted.

    explained: R², share of the variance of latencies. rank: Spearman's correlation.
    """

    requests: int
    mean_latency_ms: float
    mean_error_ms: float
    median_error_ms: float
    bias_ms: float
    explained: float
    rank: float
    deciles: Sequence[Decile]


@dataclass(frozen=True, kw_only=True, slots=True)
class Regret:
    """Over sampled requests, by the latency that each worker would have given had no request come after.

    mean_ms, p95_ms: of the chosen worker's less the least. best_share: of requests that went to the best worker.
    foreseen_ms: mean regret of the worker with the least predicted latency. any_ms: mean over all workers.
    error_ms, bias_ms: mean absolute error and mean error of the predictions, of all workers.
    """

    requests: int
    mean_ms: float
    p95_ms: float
    best_share: float
    foreseen_ms: float
    any_ms: float
    error_ms: float
    bias_ms: float


def accuracy(run: RecordedRun) -> Accuracy:
    """Over all requests that completed."""
    served = run.served
    predicted = np.array([run.decisions[each].chosen.prediction_ms for each in served])
    happened = np.array([run.happened_ms(each) for each in served])
    order = np.argsort(predicted, kind="stable")
    return Accuracy(
        requests=len(served),
        mean_latency_ms=float(happened.mean()),
        mean_error_ms=float(mean_absolute_error(happened, predicted)),
        median_error_ms=float(median_absolute_error(happened, predicted)),
        bias_ms=float((predicted - happened).mean()),
        explained=float(r2_score(happened, predicted)),
        rank=float(np.corrcoef(_ranks(predicted), _ranks(happened))[0, 1]),
        deciles=[
            Decile(predicted_ms=float(predicted[part].mean()), happened_ms=float(happened[part].mean()))
            for part in np.array_split(order, DECILES)
        ],
    )


def _ranks(values: Floats) -> Floats:
    ranks = np.empty(len(values))
    ranks[np.argsort(values, kind="stable")] = np.arange(len(values))
    return ranks


def regret(run: RecordedRun, *, samples: int) -> Regret:
    """Replays the run for each worker of each sampled request; samples lie evenly over the run."""
    served = run.served
    sampled = [served[place] for place in np.linspace(0, len(served) - 1, min(samples, len(served))).astype(int)]
    chosen, foreseen, anywhere, missed = [], [], [], []
    for request_id in sampled:
        decision = run.decisions[request_id]
        latencies = {c.worker: undisturbed_ms(run, request_id, c.worker) for c in decision.candidates}
        best = min(latencies.values())
        quickest = min(decision.candidates, key=lambda c: c.prediction_ms).worker
        chosen.append(latencies[decision.worker] - best)
        foreseen.append(latencies[quickest] - best)
        anywhere.append(float(np.mean(list(latencies.values()))) - best)
        missed += [c.prediction_ms - latencies[c.worker] for c in decision.candidates]
    return Regret(
        requests=len(sampled),
        mean_ms=float(np.mean(chosen)),
        p95_ms=float(np.quantile(chosen, 0.95)),
        best_share=float(np.mean([each < 1.0 for each in chosen])),
        foreseen_ms=float(np.mean(foreseen)),
        any_ms=float(np.mean(anywhere)),
        error_ms=float(np.mean(np.abs(missed))),
        bias_ms=float(np.mean(missed)),
    )
