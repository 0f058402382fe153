"""Rounds: one at a time per pool, bursts fall together, failures back off, and no pool holds up another."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable

import pytest

from kvrouting_operator.cluster import UnavailableError
from kvrouting_operator.pool import PoolKey
from kvrouting_operator.reconcile import Outcome
from kvrouting_operator.work_queue import Pace, WorkQueue

A, B = PoolKey(namespace="n", name="a"), PoolKey(namespace="n", name="b")
QUICK = Pace(gather_s=0.01, unsettled_s=0.02, first_retry_s=0.02, longest_s=0.05)
SETTLED = Outcome(settled=True)

Work = Callable[[PoolKey], Awaitable[Outcome | None]]


def queue_of(work: Work, *, pace: Pace = QUICK, parallel: int = 4) -> WorkQueue:
    """With coins of its own."""
    return WorkQueue(work, pace=pace, parallel=parallel, rng=random.Random(1))


async def until(holds: Callable[[], bool]) -> None:
    """Polls; the test's own time limit ends it."""
    while not holds():
        await asyncio.sleep(0.005)


async def test_a_burst_of_wakes_is_one_round_and_a_later_wake_another() -> None:
    rounds = Counter[PoolKey]()

    async def work(key: PoolKey) -> Outcome:
        rounds[key] += 1
        return SETTLED

    queue = queue_of(work)
    for _ in range(100):
        queue.wake(A)
    await until(lambda: rounds[A] == 1)
    queue.wake(A)
    await until(lambda: rounds[A] == 2)
    await queue.close()
    assert rounds[A] == 2


async def test_a_wake_during_a_round_is_not_lost() -> None:
    started, go_on = asyncio.Event(), asyncio.Event()
    rounds = 0

    async def work(key: PoolKey) -> Outcome:
        nonlocal rounds
        rounds += 1
        started.set()
        await go_on.wait()
        return SETTLED

    queue = queue_of(work)
    queue.wake(A)
    await started.wait()
    queue.wake(A)
    go_on.set()
    await until(lambda: rounds == 2)
    await queue.close()


async def test_a_pool_never_has_two_rounds_at_a_time() -> None:
    running, most = 0, 0
    rounds = 0

    async def work(key: PoolKey) -> Outcome:
        nonlocal running, most, rounds
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        rounds += 1
        return SETTLED

    queue = queue_of(work)
    while rounds < 3:
        queue.wake(A)
        await asyncio.sleep(0.002)
    await queue.close()
    assert most == 1


async def test_no_more_pools_than_allowed_are_looked_at_together() -> None:
    running, most, done = 0, 0, 0

    async def work(key: PoolKey) -> Outcome:
        nonlocal running, most, done
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.005)
        running -= 1
        done += 1
        return SETTLED

    queue = queue_of(work, parallel=3)
    for number in range(20):
        queue.wake(PoolKey(namespace="n", name=f"p{number}"))
    await until(lambda: done == 20)
    await queue.close()
    assert most == 3


@pytest.mark.parametrize("error", [UnavailableError("no answer"), ZeroDivisionError("our fault")])
async def test_a_failing_pool_is_tried_again_and_holds_up_no_other(error: Exception) -> None:
    rounds = Counter[PoolKey]()

    async def work(key: PoolKey) -> Outcome:
        rounds[key] += 1
        if key == A and rounds[A] < 4:
            raise error
        return SETTLED

    queue = queue_of(work)
    queue.wake(A)
    queue.wake(B)
    await until(lambda: rounds[A] == 4)
    await queue.close()
    assert rounds[B] == 1


async def test_an_urgent_wake_ends_a_back_off() -> None:
    rounds = 0

    async def work(key: PoolKey) -> Outcome:
        nonlocal rounds
        rounds += 1
        return Outcome(settled=True, stuck=True)

    queue = queue_of(work, pace=Pace(gather_s=0.01, unsettled_s=0.02, first_retry_s=1000, longest_s=1000))
    queue.wake(A)
    await until(lambda: rounds == 1)
    queue.wake(A)
    await asyncio.sleep(0.05)
    assert rounds == 1
    queue.wake(A, urgent=True)
    await until(lambda: rounds == 2)
    await queue.close()


async def test_something_under_way_is_looked_at_again_by_itself() -> None:
    rounds = 0

    async def work(key: PoolKey) -> Outcome:
        nonlocal rounds
        rounds += 1
        return Outcome(settled=rounds >= 3)

    queue = queue_of(work)
    queue.wake(A)
    await until(lambda: rounds == 3)
    await asyncio.sleep(0.1)
    await queue.close()
    assert rounds == 3


async def test_a_pool_that_is_gone_is_forgotten_and_may_come_back() -> None:
    rounds = 0

    async def work(key: PoolKey) -> None:
        nonlocal rounds
        rounds += 1

    queue = queue_of(work)
    queue.wake(A)
    await until(lambda: rounds == 1 and not queue.keys)
    queue.wake(A)
    await until(lambda: rounds == 2 and not queue.keys)


def test_back_off_doubles_to_its_limit() -> None:
    pace = Pace(first_retry_s=1, longest_s=60)
    waits = [pace.retry_s(failures, random.Random(0)) for failures in range(1, 12)]
    assert all(0.5 * min(60, 2**n) <= wait <= min(60, 2**n) for n, wait in enumerate(waits))
    with pytest.raises(ValueError, match="first_retry_s"):
        Pace(first_retry_s=0)
