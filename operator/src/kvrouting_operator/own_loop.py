"""Work in a thread and an event loop of its own, so that it can neither cancel other work nor keep the process."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from typing import Any

# flag: tells the work to end. about_to_end: the work says that it does.
Work = Callable[[asyncio.Event, Callable[[], None]], Coroutine[Any, Any, None]]


class DoesNotEndError(Exception):
    """Work that was about to end is still there after its limit. Nothing in the process can end it."""


async def in_own_loop(work: Work, *, name: str, ends_s: float) -> None:
    """Runs the work until it ends. Cancelled, it tells the work to end and waits for that, up to ends_s.

    Raises: what the work raises; DoesNotEndError ends_s after it said that it was about to end.
    """
    running = _Running(work)
    thread = threading.Thread(target=running.run, name=name, daemon=True)
    thread.start()
    ending = asyncio.ensure_future(running.ending.wait())
    try:
        await asyncio.wait((running.outcome, ending), return_when=asyncio.FIRST_COMPLETED)
        if not await running.ends_within(ends_s):
            raise DoesNotEndError(f"{name} was about to end and has not done so within {ends_s:g} s")
        running.outcome.result()
    except asyncio.CancelledError:
        running.tell_to_end()
        await running.ends_within(ends_s)
        raise
    finally:
        ending.cancel()


class _Running:
    """Belongs to the loop that waits for it; `run` is the other thread's."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._loop = asyncio.get_running_loop()
        self._is_told = threading.Event()
        self._their: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None
        self.ending = asyncio.Event()
        self.outcome: asyncio.Future[None] = self._loop.create_future()

    def run(self) -> None:
        try:
            asyncio.run(self._main())
        except BaseException as error:  # noqa: BLE001 - told to the loop that waits
            self._settle(error)
        else:
            self._settle(None)

    async def _main(self) -> None:
        flag = asyncio.Event()
        self._their = (asyncio.get_running_loop(), flag)
        if self._is_told.is_set():
            flag.set()
        await self._work(flag, lambda: self._here(self.ending.set))

    def _settle(self, error: BaseException | None) -> None:
        def settle() -> None:
            if error is None:
                self.outcome.set_result(None)
            else:
                self.outcome.set_exception(error)
                self.outcome.exception()  # whoever waits no more has not missed it

        self._here(settle)

    def _here(self, function: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop that waited is closed: the process ends
            self._loop.call_soon_threadsafe(function)

    def tell_to_end(self) -> None:
        self._is_told.set()
        if self._their is not None:
            loop, flag = self._their
            with contextlib.suppress(RuntimeError):  # it has ended meanwhile
                loop.call_soon_threadsafe(flag.set)

    async def ends_within(self, limit_s: float) -> bool:
        done, _ = await asyncio.wait((self.outcome,), timeout=limit_s)
        return bool(done)
