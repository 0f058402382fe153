"""Work in a loop of its own: its end, its errors and its refusal to end stay with it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from kvrouting_operator.own_loop import DoesNotEndError, in_own_loop

LIMIT_S = 30.0


async def test_work_ends_or_fails_as_if_it_were_here() -> None:
    threads: list[str] = []

    async def good(_flag: asyncio.Event, _about_to_end: Callable[[], None]) -> None:
        threads.append(threading.current_thread().name)

    async def bad(_flag: asyncio.Event, _about_to_end: Callable[[], None]) -> None:
        raise ZeroDivisionError("bad")

    await in_own_loop(good, name="mine", ends_s=LIMIT_S)
    assert threads == ["mine"]
    with pytest.raises(ZeroDivisionError, match="bad"):
        await in_own_loop(bad, name="mine", ends_s=LIMIT_S)


async def test_cancelled_it_is_told_and_its_end_is_waited_for() -> None:
    ended: list[str] = []
    begun = threading.Event()

    async def work(flag: asyncio.Event, _about_to_end: Callable[[], None]) -> None:
        begun.set()
        await flag.wait()
        await asyncio.sleep(0.05)
        ended.append("in order")

    running = asyncio.create_task(in_own_loop(work, name="mine", ends_s=LIMIT_S))
    await asyncio.to_thread(begun.wait)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert ended == ["in order"]


async def test_what_is_about_to_end_and_does_not_is_an_error() -> None:
    release = threading.Event()

    async def stuck(_flag: asyncio.Event, about_to_end: Callable[[], None]) -> None:
        about_to_end()
        while not release.is_set():
            await asyncio.sleep(0.01)

    with pytest.raises(DoesNotEndError, match=r"mine was about to end and has not done so within 0\.05 s"):
        await in_own_loop(stuck, name="mine", ends_s=0.05)
    release.set()


async def test_work_that_takes_its_time_to_end_is_waited_for() -> None:
    async def slow(_flag: asyncio.Event, about_to_end: Callable[[], None]) -> None:
        about_to_end()
        await asyncio.sleep(0.05)
        raise ConnectionResetError("the reason")

    with pytest.raises(ConnectionResetError, match="the reason"):
        await in_own_loop(slow, name="mine", ends_s=LIMIT_S)


async def test_all_tasks_of_its_loop_are_its_own() -> None:
    """As kopf does at its end."""
    others = asyncio.create_task(asyncio.Event().wait())

    async def cancel_all(_flag: asyncio.Event, _about_to_end: Callable[[], None]) -> None:
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    await in_own_loop(cancel_all, name="mine", ends_s=LIMIT_S)
    await asyncio.sleep(0)
    assert not others.done()
    others.cancel()
