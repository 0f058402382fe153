"""When the generator sends, and what it writes down; the other side is a fake."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Callable, Sequence

import pytest

from kvrouting_core.routing.events import Outcome
from kvrouting_simulator.loadgen.attempt import Attempt
from kvrouting_simulator.loadgen.generator import Limits, LoadGenerator
from kvrouting_simulator.report import RequestRecord
from kvrouting_simulator.workloads.client import ScheduledClient
from kvrouting_simulator.workloads.work_item import ReadyRequest, WorkItem, Workload


def item(number: int, *, arrival_ms: float = 0.0, depends_on: str | None = None) -> WorkItem:
    return WorkItem(
        request_id=f"r{number}",
        arrival_ms=arrival_ms,
        tokens=array("I", [number]),
        output_tokens=2,
        session="s",
        turn=number,
        depends_on=depends_on,
        continues=depends_on is not None,
    )


class FakeSender:
    """Answers each request when `answer` lets it; remembers what was sent."""

    def __init__(self, answer: Callable[[ReadyRequest, int], Attempt | asyncio.Future[Attempt]]) -> None:
        self.sent: list[ReadyRequest] = []
        self._answer = answer

    async def send(self, request: ReadyRequest, *, on_sent: Callable[[], None]) -> Attempt:
        on_sent()
        self.sent.append(request)
        answer = self._answer(request, sum(r.request_id == request.request_id for r in self.sent))
        return answer if isinstance(answer, Attempt) else await answer


def good(request: ReadyRequest, _times: int) -> Attempt:
    now_s = time.monotonic()
    return Attempt(
        outcome=Outcome.COMPLETED,
        end_s=now_s,
        first_token_s=now_s,
        token_ids=array("I", [100, 101]),
        output_tokens=2,
        cached_tokens=1,
        worker="engine-0/0",
    )


def cut() -> Attempt:
    return Attempt(outcome=Outcome.FAILED, end_s=time.monotonic(), error="stream_cut: gone", cut=True)


def generator(
    items: Sequence[WorkItem], sender: FakeSender, *, limits: Limits | None = None
) -> tuple[LoadGenerator, list[RequestRecord]]:
    seen: list[RequestRecord] = []
    made = LoadGenerator(
        client=ScheduledClient(Workload(name="test", items=items)),
        sender=sender,
        monotonic_s=time.monotonic,
        limits=limits or Limits(),
        on_record=seen.append,
    )
    return made, seen


async def test_arrivals_do_not_wait_for_answers() -> None:
    everything_sent = asyncio.Event()

    async def when_all_are_sent(request: ReadyRequest) -> Attempt:
        if len(sender.sent) == 5:
            everything_sent.set()
        await everything_sent.wait()
        return good(request, 1)

    sender = FakeSender(lambda request, _times: asyncio.ensure_future(when_all_are_sent(request)))
    run, seen = generator([item(n, arrival_ms=n) for n in range(5)], sender)
    await asyncio.wait_for(run.run(), 20)
    assert {r.request_id for r in seen} == {"r0", "r1", "r2", "r3", "r4"}
    assert run.records == seen
    assert all(r.completed for r in seen)


async def test_a_turn_waits_for_the_answer_before_it_and_contains_it() -> None:
    sender = FakeSender(good)
    run, _ = generator([item(1), item(2, depends_on="r1"), item(3, depends_on="r2")], sender)
    await run.run()
    assert [r.prompt.tolist() for r in sender.sent] == [[1], [1, 100, 101, 2], [1, 100, 101, 2, 100, 101, 3]]


async def test_a_turn_after_a_failure_is_sent_all_the_same() -> None:
    failed = Attempt(outcome=Outcome.FAILED, end_s=0.0, token_ids=array("I", [100]), error="http_500: oops")

    def answer(request: ReadyRequest, times: int) -> Attempt:
        if request.request_id != "r1":
            return good(request, times)
        return Attempt(outcome=failed.outcome, end_s=time.monotonic(), token_ids=failed.token_ids, error=failed.error)

    sender = FakeSender(answer)
    run, seen = generator([item(1), item(2, depends_on="r1")], sender)
    await run.run()
    assert [r.request_id for r in sender.sent] == ["r1", "r2"], "nothing is sent twice"
    assert sender.sent[1].prompt.tolist() == [1, 2]
    assert [r.outcome for r in seen] == [Outcome.FAILED, Outcome.COMPLETED]
    assert seen[0].error == "http_500: oops"


async def test_a_cut_answer_is_sent_again_only_if_that_is_asked_for() -> None:
    sender = FakeSender(lambda request, times: cut() if times == 1 else good(request, times))
    run, seen = generator([item(1)], sender)
    await run.run()
    assert [r.outcome for r in seen] == [Outcome.FAILED]

    sender = FakeSender(lambda request, times: cut() if times == 1 else good(request, times))
    run, seen = generator([item(1)], sender, limits=Limits(resubmissions=1))
    await run.run()
    assert [(r.outcome, r.resubmissions) for r in seen] == [(Outcome.COMPLETED, 1)]
    assert seen[0].arrival_ms == 0.0


async def test_resubmission_has_an_end() -> None:
    sender = FakeSender(lambda _request, _times: cut())
    run, seen = generator([item(1)], sender, limits=Limits(resubmissions=2))
    await run.run()
    assert len(sender.sent) == 3
    assert (seen[0].outcome, seen[0].resubmissions) == (Outcome.FAILED, 2)


async def test_nothing_that_is_due_after_the_duration_is_sent() -> None:
    sender = FakeSender(good)
    run, _ = generator([item(1), item(2, arrival_ms=3_600_000)], sender, limits=Limits(duration_s=60))
    await run.run()
    assert [r.request_id for r in sender.sent] == ["r1"]


async def test_stopping_writes_down_what_was_under_way() -> None:
    never: asyncio.Future[Attempt] = asyncio.get_running_loop().create_future()
    sender = FakeSender(lambda request, times: good(request, times) if request.request_id == "r1" else never)
    run, seen = generator([item(1), item(2), item(3, depends_on="r2"), item(4, arrival_ms=3_600_000)], sender)
    task = asyncio.create_task(run.run())
    while len(sender.sent) < 2:
        await asyncio.sleep(0)
    run.stop()
    await asyncio.wait_for(task, 20)
    assert {(r.request_id, r.outcome) for r in seen} == {("r1", Outcome.COMPLETED), ("r2", Outcome.CANCELLED)}
    assert [r.request_id for r in sender.sent] == ["r1", "r2"]


async def test_a_programming_error_ends_the_run() -> None:
    def broken(_request: ReadyRequest, _times: int) -> Attempt:
        raise RuntimeError("broken sender")

    run, _ = generator([item(1)], FakeSender(broken))
    with pytest.RaisesGroup(pytest.RaisesExc(RuntimeError, match="broken sender")):
        await run.run()


async def test_records_carry_what_was_sent_and_said() -> None:
    sender = FakeSender(good)
    run, seen = generator([item(1, arrival_ms=5.0)], sender)
    await run.run()
    (only,) = seen
    assert only.arrival_ms == 5.0
    assert only.sent_ms is not None
    assert only.sent_ms >= 5.0
    assert (only.prompt_tokens, only.cached_tokens, only.output_tokens) == (1, 1, 2)
    assert only.worker == "engine-0/0"


@pytest.mark.parametrize(
    ("wrong", "named"),
    [({"duration_s": 0.0}, "duration_s"), ({"resubmissions": -1}, "resubmissions")],
)
def test_limits_refuse_nonsense(wrong: dict[str, int], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Limits(**wrong)
