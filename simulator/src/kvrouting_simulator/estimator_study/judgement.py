"""Predictions against what happened, in numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from sklearn.metrics import mean_absolute_error, median_absolute_error, r2_score

from kvrouting_simulator.estimator_study.recorded_run import RecordedRun, latency_elsewhere_ms

Floats = NDArray[np.float64]
DECILES = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class Decile:
    """A tenth of the requests, by what was predicted for them; means in ms."""

    predicted_ms: float
    happened_ms: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Accuracy:
    """Of the predicted latency of the chosen worker. Errors in ms; bias: mean, positive where too long was predicted.

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
    """Latency on the chosen worker less that on the best one in hindsight, over sampled requests.

    best_share: of them, went to the best. foreseen_ms: mean regret of sending each, alone, where the least latency was
    predicted. any_ms: of sending it to any worker, the mean over all of them.
    """

    requests: int
    mean_ms: float
    p95_ms: float
    best_share: float
    foreseen_ms: float
    any_ms: float


def accuracy(run: RecordedRun) -> Accuracy:
    """Over all requests that completed."""
    served = run.served
    predicted = np.array([run.decisions[each].chosen.prediction_ms for each in served])
    happened = np.array([run.records[each].latency_ms for each in served])
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
    """Replays the run for each other worker of each sampled request; samples lie evenly over the run."""
    served = run.served
    sampled = [served[place] for place in np.linspace(0, len(served) - 1, min(samples, len(served))).astype(int)]
    chosen, foreseen, anywhere = [], [], []
    for request_id in sampled:
        decision = run.decisions[request_id]
        latencies = {
            c.worker: run.records[request_id].latency_ms
            if c.worker == decision.worker
            else latency_elsewhere_ms(run, request_id, c.worker)
            for c in decision.candidates
        }
        best = min(latencies.values())
        quickest = min(decision.candidates, key=lambda c: c.prediction_ms).worker
        chosen.append(latencies[decision.worker] - best)
        foreseen.append(latencies[quickest] - best)
        anywhere.append(float(np.mean(list(latencies.values()))) - best)
    return Regret(
        requests=len(sampled),
        mean_ms=float(np.mean(chosen)),
        p95_ms=float(np.quantile(chosen, 0.95)),
        best_share=float(np.mean([each < 1.0 for each in chosen])),
        foreseen_ms=float(np.mean(foreseen)),
        any_ms=float(np.mean(anywhere)),
    )
