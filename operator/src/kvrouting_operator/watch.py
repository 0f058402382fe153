"""kopf's watches, kept going: what ends them is told, and they are begun anew after a pause, in the same process.

Pools are looked at regularly all the while, so a watch that is away only makes the operator slower.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable

from kvrouting_operator.own_loop import DoesNotEndError
from kvrouting_operator.work_queue import Pace

_logger = logging.getLogger(__name__)

# A watch that has lasted so long was no failed start: the next pause is the first one again.
_LASTING_S = 300.0


class Watch:
    """begin: runs the watches until the process is told to stop, or raises. on_begin: called before each begin.
    on_end: gets why they ended, before each pause. now_s: a monotonic clock.
    """

    def __init__(
        self,
        begin: Callable[[], Awaitable[None]],
        *,
        on_begin: Callable[[], None],
        on_end: Callable[[str], None],
        pace: Pace,
        rng: random.Random,
        now_s: Callable[[], float],
    ) -> None:
        self._begin = begin
        self._on_begin = on_begin
        self._on_end = on_end
        self._pace = pace
        self._rng = rng
        self._now_s = now_s

    async def run(self) -> None:
        """Until the watches end because they are told to. Raises: DoesNotEndError, for only another process helps."""
        failures = 0
        while True:
            self._on_begin()
            began_s = self._now_s()
            try:
                await self._begin()
            except DoesNotEndError:
                raise
            except Exception as error:
                # Of whatever kind: without a watch the process still works, and ending it would cure nothing.
                failures = 1 if self._now_s() - began_s >= _LASTING_S else failures + 1
                pause_s = self._pace.retry_s(failures, self._rng)
                reason = f"{type(error).__name__}: {error}"
                _logger.exception("the watch has ended", extra={"fields": {"error": reason, "pause_s": pause_s}})
                self._on_end(reason)
                await asyncio.sleep(pause_s)
            else:
                return
