"""How a second thread shares the interpreter with a scheduler that must not wait."""

from __future__ import annotations

import time
from collections.abc import Callable

_WORK_S = 0.0004
_REST_S = 0.001


class Pauses:
    """Called between short steps of work, it lets go of the interpreter often enough.

    A thread that just works keeps the interpreter for 5 ms at a time (sys.getswitchinterval). This one works for at
    most 0.4 ms and one step, then rests for 1 ms.
    """

    def __init__(
        self,
        *,
        clock_s: Callable[[], float] = time.perf_counter,
        sleep_s: Callable[[float], None] = time.sleep,
    ) -> None:
        self._clock_s = clock_s
        self._sleep_s = sleep_s
        self._since_s = clock_s()

    def between_steps(self) -> None:
        """Rests if it is time to."""
        if self._clock_s() - self._since_s > _WORK_S:
            self.rest()

    def rest(self) -> None:
        """Rests now."""
        self._sleep_s(_REST_S)
        self._since_s = self._clock_s()
