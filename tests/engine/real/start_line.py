"""Starts that take a minute each, on their way while tests run that do not need them yet."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

from tests.engine.real.servers import RealServer

T = TypeVar("T")

# One loads its libraries in a single process before it has several: alone it would leave a core without work, and with
# more than two the first one would be ready as late as the last one.
AT_ONCE = 2


class StartLine:
    """Runs what it is given in that order, two at a time. What fails does so where its result is asked for."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=AT_ONCE, thread_name_prefix="start-line")
        self._begun: list[Future[object]] = []

    def begin(self, start: Callable[[], T]) -> Future[T]:
        future = self._pool.submit(start)
        self._begun.append(future)  # type: ignore[arg-type]
        return future

    def until_all_are_done(self) -> None:
        wait(self._begun)

    def close(self) -> None:
        """Forgets what has not begun."""
        self._pool.shutdown(wait=False, cancel_futures=True)


class StartingServer:
    """A server on its way to be ready."""

    def __init__(self, line: StartLine, server: RealServer) -> None:
        self.server = server
        self._ready = line.begin(lambda: server.start().wait_until_ready())

    def ready(self) -> RealServer:
        """Waits for it. Raises: as `RealServer.wait_until_ready`."""
        return self._ready.result()

    def stop(self) -> None:
        self._ready.cancel()
        self.server.stop()
