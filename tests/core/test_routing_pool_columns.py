"""The pool as vectors says what the stations say one by one, whatever happened to them."""

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
from kvrouting_core.routing.station import Station
from kvrouting_core.service_time import WORKER_CLASSES

CHUNK_TOKENS = 3000
QUEUES: dict[str, Callable[[], QueueLoad]] = {
    "drained": lambda: DrainedQueue(chunk_tokens=CHUNK_TOKENS),
    "decayed": lambda: DecayedQueue(factor=0.9, interval_ms=100.0),
}


@dataclass(frozen=True)
class Happening:
    """What happens at one station, after some ms; `number` is of the request, or of tokens, or a speed in tenths."""

    station: int
    kind: str
    after_ms: float
    number: int


happenings = st.builds(
    Happening,
    station=st.integers(0, 2),
    kind=st.sampled_from(["sent", "first token", "ended", "report", "speed", "relative speed", "nothing"]),
    after_ms=st.floats(0, 300),
    number=st.integers(1, 5000),
)


class Stations:
    """Three stations, driven as the estimator drives them."""

    def __init__(self, queue: str) -> None:
        scheduler, pool = SchedulerOptions(chunked_prefill_tokens=CHUNK_TOKENS), PoolResidual()
        self.all = [
            Station(times=times, scheduler=scheduler, queue=QUEUES[queue](), residual=WorkerResidual(pool))
            for times in (WORKER_CLASSES[name].times for name in ("L40", "H200", "L40"))
        ]
        self.sent: list[list[str]] = [[], [], []]
        self.now_ms = 0.0
        self.count = 0
        self.prefilled_tokens = 0

    def take(self, event: Happening) -> None:
        self.now_ms += event.after_ms
        station, sent = self.all[event.station], self.sent[event.station]
        match event.kind:
            case "sent":
                self.count += 1
                sent.append(str(self.count))
                station.add(self.work(station, sent[-1], event.number))
            case "first token" if sent:
                station.prefilled(sent[event.number % len(sent)], now_ms=self.now_ms)
            case "ended" if sent:
                station.remove(sent.pop(event.number % len(sent)), now_ms=self.now_ms)
            case "report":
                self.report(station, event.number)
            case "speed":
                station.set_speed(event.number % 40 / 10 + 0.1)
            case "relative speed":
                station.set_relative_speed(event.number % 40 / 10 + 0.1)

    def work(self, station: Station, name: str, tokens: int) -> Work:
        prefill_ms = station.times.prefill_work_ms(0, tokens)
        return Work(
            request_id=name, dispatched_ms=self.now_ms, uncached_tokens=tokens, prefill_ms=prefill_ms,
            service_ms=prefill_ms + 60, context_tokens=tokens, sequences=1 + tokens % 3,
        )  # fmt: skip

    def report(self, station: Station, number: int) -> None:
        self.prefilled_tokens += number
        station.reported(
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
    stations = Stations(queue)
    columns = PoolColumns(stations.all)
    for event, look in [*history, (Happening(0, "nothing", later_ms, 1), True)]:
        stations.take(event)
        if not look:
            continue
        columns.refresh()
        for place, station in enumerate(stations.all):
            assert (columns.a[place], columns.b[place]) == (station.a, station.b)
            assert (columns.speed[place], columns.relative_speed[place]) == (station.speed, station.relative_speed)
            assert (columns.step_ms[place], columns.running[place]) == (station.step_ms, station.running)
            assert columns.sequences[place] == station.sequences
            assert columns.running_limit[place] == station.running_limit
            assert columns.others_until_ms[place] == station.others.until_ms
            queue_ms = columns.queues_ms(stations.now_ms)[place]
            assert queue_ms == station.queue.load_ms(stations.now_ms, station.speed)
            assert columns.prefill_ms(1234.5)[place] == station.mean_work_ms(1234.5)
