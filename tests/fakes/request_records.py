"""Records and runs made from a few words."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from kvrouting_core.routing.events import Outcome
from kvrouting_simulator.report import PoolMark, RequestRecord, Run, summarise


def record(
    request_id: str = "r",
    *,
    arrival_ms: float = 0.0,
    ttft_ms: float | None = 100.0,
    latency_ms: float = 400.0,
    prompt_tokens: int = 100,
    cached_tokens: int = 0,
    output_tokens: int = 4,
    worker: str | None = "engine-0",
    error: str | None = None,
    outcome: Outcome | None = None,
    sent_ms: float | None = None,
    resubmissions: int = 0,
) -> RequestRecord:
    """A completed request, or one that failed with `error`."""
    return RequestRecord(
        request_id=request_id,
        arrival_ms=arrival_ms,
        first_token_ms=None if ttft_ms is None else arrival_ms + ttft_ms,
        end_ms=arrival_ms + latency_ms,
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
        output_tokens=output_tokens,
        worker=worker,
        outcome=outcome or (Outcome.COMPLETED if error is None else Outcome.FAILED),
        error=error,
        sent_ms=sent_ms,
        resubmissions=resubmissions,
    )


def random_records(seed: int, *, count: int = 200) -> tuple[RequestRecord, ...]:
    """Requests of two workers with all that can vary varied; about one in twenty fails."""
    rng = random.Random(seed)
    records = []
    arrival_ms = 0.0
    for number in range(count):
        arrival_ms += rng.expovariate(1 / 80)
        prompt = rng.choice((512, 1024, 2048))
        records.append(
            record(
                f"r{number}",
                arrival_ms=arrival_ms,
                ttft_ms=rng.uniform(20, 300),
                latency_ms=rng.uniform(310, 2000),
                prompt_tokens=prompt,
                cached_tokens=rng.randrange(prompt),
                worker=f"engine-{rng.randrange(2)}",
                error="connection: refused" if rng.random() < 0.05 else None,
                sent_ms=arrival_ms + rng.random(),
                resubmissions=int(rng.random() < 0.02),
            )
        )
    return tuple(records)


def run(
    name: str,
    records: Sequence[RequestRecord],
    *,
    marks: Sequence[PoolMark] = (),
    parameters: Mapping[str, str | int | float | bool | None] | None = None,
    goodput_ttft_ms: float | None = None,
) -> Run:
    """A run with the summary of its records."""
    return Run(
        name=name,
        parameters=parameters or {"policy": name, "rate": 12.0},
        records=tuple(records),
        summary=summarise(records, goodput_ttft_ms=goodput_ttft_ms),
        marks=tuple(marks),
        notes=(f"a note about {name}",),
    )
