"""The pool as vectors says what the worker loads say one by one, whatever happened to them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouting_core.identity import WorkerId
from kvrouting_core.routing.events import LoadReport, SchedulerOptions
from kvrouting_core.routing.pool_columns import PoolColumns
from kvrouting_core.routing.queue_load import DecayedQueue, DrainedQueue, QueueLoad, Work
from kvrouting_core.routing.residual import PoolResidual, WorkerResidual
from kvrouting_core.routing.worker_load import WorkerLoad
from kvrouting_core.service_time import WORKER_CLASSES

CHUNK_TOKENS = 3000
QUEUES: dict[str, Callable[[], QueueLoad]] = {
    "drained": lambda: DrainedQueue(chunk_tokens=CHUNK_TOKENS),
    "decayed": lambda: DecayedQueue(factor=0.9, interval_ms=100.0),
}


@dataclass(frozen=True)
class Happening:
    """An event at one worker after some ms. number: a request, a count of tokens, or a speed in tenths."""

    worker_load: int
    kind: str
    after_ms: float
    number: int


happenings = st.builds(
    Happening,
    worker_load=st.integers(0, 2),
    kind=st.sampled_from(["sent", "first token", "ended", "report", "speed", "relative speed", "nothing"]),
    after_ms=st.floats(0, 300),
    number=st.integers(1, 5000),
)


class WorkerLoads:
    """Three worker loads, driven as the estimator drives them."""

    def __init__(self, queue: str) -> None:
        scheduler, pool = SchedulerOptions(chunked_prefill_tokens=CHUNK_TOKENS), PoolResidual()
        self.all = [
            WorkerLoad(times=times, scheduler=scheduler, queue=QUEUES[queue](), residual=WorkerResidual(pool))
            for times in (WORKER_CLASSES[name].times for name in ("L40", "H200", "L40"))
        ]
        self.sent: list[list[str]] = [[], [], []]
        self.now_ms = 0.0
        self.count = 0
        self.prefilled_tokens = 0

    def take(self, event: Happening) -> None:
        self.now_ms += event.after_ms
        worker_load, sent = self.all[event.worker_load], self.sent[event.worker_load]
        match event.kind:
            case "sent":
                self.count += 1
                sent.append(str(self.count))
                worker_load.add(self.work(worker_load, sent[-1], event.number))
            case "first token" if sent:
                worker_load.prefilled(sent[event.number % len(sent)], now_ms=self.now_ms)
            case "ended" if sent:
                worker_load.remove(sent.pop(event.number % len(sent)), now_ms=self.now_ms)
            case "report":
                self.report(worker_load, event.number)
            case "speed":
                worker_load.set_speed(event.number % 40 / 10 + 0.1)
            case "relative speed":
                worker_load.set_relative_speed(event.number % 40 / 10 + 0.1)

    def work(self, worker_load: WorkerLoad, name: str, tokens: int) -> Work:
        prefill_ms = worker_load.times.prefill_work_ms(0, tokens)
        return Work(
            request_id=name, dispatched_ms=self.now_ms, uncached_tokens=tokens, prefill_ms=prefill_ms,
            service_ms=prefill_ms + 60, context_tokens=tokens, sequences=1 + tokens % 3,
        )  # fmt: skip

    def report(self, worker_load: WorkerLoad, number: int) -> None:
        self.prefilled_tokens += number
        worker_load.reported(
            LoadReport(
                worker=WorkerId("w"), reported_ms=self.now_ms, running_requests=number % 7, waiting_requests=number % 3,
                used_tokens=0, waiting_uncached_tokens=number, total_prefill_uncached_tokens=self.prefilled_tokens,
                total_prefill_busy_us=100 * self.prefilled_tokens,
            ),
            now_ms=self.now_ms,
        )  # fmt: skip


@pytest.mark.parametrize("queue", QUEUES)
@given(history=st.lists(st.tuples(happenings, st.booleans()), max_size=60), later_ms=st.floats(0, 1000))
def test_vectors_say_what_the_stations_say(queue: str, history: list[tuple[Happening, bool]], later_ms: float) -> None:
    worker_loads = WorkerLoads(queue)
    columns = PoolColumns(worker_loads.all)
    for event, look in [*history, (Happening(0, "nothing", later_ms, 1), True)]:
        worker_loads.take(event)
        if not look:
            continue
        columns.refresh()
        for worker_index, worker_load in enumerate(worker_loads.all):
            assert (columns.a[worker_index], columns.b[worker_index]) == (worker_load.a, worker_load.b)
            assert (columns.speed[worker_index], columns.relative_speed[worker_index]) == (
                worker_load.speed,
                worker_load.relative_speed,
            )
            assert (columns.step_ms[worker_index], columns.running[worker_index]) == (
                worker_load.step_ms,
                worker_load.running,
            )
            assert columns.sequences[worker_index] == worker_load.sequences
            assert columns.running_limit[worker_index] == worker_load.running_limit
            assert columns.others_until_ms[worker_index] == worker_load.others.until_ms
            queue_ms = columns.queues_ms(worker_loads.now_ms)[worker_index]
            assert queue_ms == worker_load.queue.load_ms(worker_loads.now_ms, worker_load.speed)
            assert columns.prefill_ms(1234.5)[worker_index] == worker_load.mean_work_ms(1234.5)
