"""Watches are begun anew for as long as the process lives, after pauses that grow."""

from __future__ import annotations

import asyncio
import random

import pytest

from kvrouting_operator.own_loop import DoesNotEndError
from kvrouting_operator.watch import Watch
from kvrouting_operator.work_queue import Pace

PACE = Pace(gather_s=0.0, unsettled_s=0.0, first_retry_s=0.004, longest_s=0.016)


class Broken:
    """Watches that fail so often, and then end as they are told to. lasting_s: how long each has lasted. error: with
    which they fail.
    """

    def __init__(self, failures: int, *, lasting_s: float = 0.0, error: Exception | None = None) -> None:
        self._error = error
        self.begun = 0
        self.told: list[str] = []
        self._failures = failures
        self._lasting_s = lasting_s
        self._now_s = 0.0

    def now_s(self) -> float:
        return self._now_s

    async def begin(self) -> None:
        self.begun += 1
        self._now_s += self._lasting_s
        if self.begun <= self._failures:
            raise self._error or ConnectionResetError(f"number {self.begun}")


def watch_of(broken: Broken) -> Watch:
    return Watch(
        broken.begin,
        on_begin=lambda: broken.told.append("begun"),
        on_end=broken.told.append,
        pace=PACE,
        rng=random.Random(1),
        now_s=broken.now_s,
    )


async def test_a_watch_that_fails_is_begun_anew_and_each_time_the_reason_is_told() -> None:
    broken = Broken(failures=2)
    await watch_of(broken).run()
    assert broken.begun == 3
    assert broken.told == [
        "begun",
        "ConnectionResetError: number 1",
        "begun",
        "ConnectionResetError: number 2",
        "begun",
    ]


@pytest.mark.parametrize(("lasting_s", "last_pause_s"), [(0.0, (0.008, 0.016)), (301.0, (0.002, 0.004))])
async def test_pauses_grow_while_the_watch_fails_at_its_start(
    lasting_s: float, last_pause_s: tuple[float, float], caplog: pytest.LogCaptureFixture
) -> None:
    await watch_of(Broken(failures=5, lasting_s=lasting_s)).run()
    pauses = [record.__dict__["fields"]["pause_s"] for record in caplog.records]
    assert len(pauses) == 5
    assert 0.002 <= pauses[0] <= 0.004
    assert last_pause_s[0] <= pauses[-1] <= last_pause_s[1]


async def test_a_watch_that_does_not_end_is_not_begun_anew_but_ends_the_process() -> None:
    broken = Broken(failures=1, error=DoesNotEndError("kopf was about to end"))
    with pytest.raises(DoesNotEndError, match="kopf was about to end"):
        await watch_of(broken).run()
    assert broken.begun == 1


async def test_a_process_that_is_told_to_end_ends_in_a_pause_too() -> None:
    broken = Broken(failures=10**6)
    running = asyncio.create_task(watch_of(broken).run())
    while broken.begun < 3:
        await asyncio.sleep(0.001)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
