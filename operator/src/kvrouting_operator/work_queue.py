"""Which pools are looked at, and when: one round per pool at a time, wishes for a round fall together, errors
back off.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from kvrouting_operator.cluster import ClusterError
from kvrouting_operator.pool import PoolKey
from kvrouting_operator.reconcile import Outcome

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """Seconds. gather: after a wake, so that a burst of changes is one round. unsettled: to the next look at a pool
    with something under way. stuck, first_retry, longest: back-off after a round that failed, or that something keeps
    from its goal: doubles from first_retry to longest, drawn from the upper half.
    """

    gather_s: float = 0.2
    unsettled_s: float = 2.0
    first_retry_s: float = 1.0
    longest_s: float = 60.0

    def __post_init__(self) -> None:
        if not 0 <= self.gather_s <= self.unsettled_s:
            raise ValueError(f"gather_s must be between 0 and unsettled_s, got {self.gather_s} and {self.unsettled_s}")
        if not 0 < self.first_retry_s <= self.longest_s:
            raise ValueError(f"first_retry_s must be between 0 and longest_s, got {self.first_retry_s}")

    def retry_s(self, failures: int, rng: random.Random) -> float:
        """Before the next round, after so many failures in a row (at least 1)."""
        whole = min(self.longest_s, self.first_retry_s * 2.0 ** (failures - 1))
        return float(whole * rng.uniform(0.5, 1.0))


class WorkQueue:
    """All methods belong to one event loop. work: one round; None if the pool is gone."""

    def __init__(
        self, work: Callable[[PoolKey], Awaitable[Outcome | None]], *, pace: Pace, parallel: int, rng: random.Random
    ) -> None:
        self._work = work
        self._pace = pace
        self._rng = rng
        self._slots = asyncio.Semaphore(parallel)
        self._follows: dict[PoolKey, _Follow] = {}
        self.rounds = 0

    def wake(self, key: PoolKey, *, urgent: bool = False) -> None:
        """There is something to look at. urgent: also during a back-off, as when a user has changed the spec."""
        follow = self._follows.get(key)
        if follow is None:
            follow = self._follows[key] = _Follow()
            follow.task = asyncio.get_running_loop().create_task(self._rounds_of(key, follow), name=f"pool {key}")
        follow.woken.set()
        if urgent:
            follow.urgent.set()

    @property
    def keys(self) -> frozenset[PoolKey]:
        """Pools that are followed."""
        return frozenset(self._follows)

    async def close(self) -> None:
        """Ends all rounds; one that runs in a thread is not waited for."""
        tasks = [follow.task for follow in self._follows.values() if follow.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _rounds_of(self, key: PoolKey, follow: _Follow) -> None:
        """Rounds for one pool until it is gone."""
        failures, pause_s = 0, None
        try:
            while True:
                await _wait(follow.woken, pause_s)
                await asyncio.sleep(self._pace.gather_s)
                follow.woken.clear()
                follow.urgent.clear()
                outcome, failed = await self._round(key)
                if outcome is None and not failed and not follow.woken.is_set():
                    return
                failures = failures + 1 if failed or (outcome is not None and outcome.stuck) else 0
                if failures:
                    # A failure often causes changes itself: only an urgent wake ends the back-off.
                    await _wait(follow.urgent, self._pace.retry_s(failures, self._rng))
                    follow.woken.set()
                pause_s = None if outcome is None or outcome.settled else self._pace.unsettled_s
        finally:
            del self._follows[key]

    async def _round(self, key: PoolKey) -> tuple[Outcome | None, bool]:
        """Outcome, and whether the round failed."""
        async with self._slots:
            self.rounds += 1
            try:
                return await self._work(key), False
            except ClusterError as error:
                _logger.warning("a round failed", extra={"fields": {"pool": str(key), "error": str(error)}})
            except Exception:
                # A fault of ours in one pool must not end the rounds of the others.
                _logger.exception("a round failed by a fault of the operator", extra={"fields": {"pool": str(key)}})
            return None, True


class _Follow:
    """One pool that is followed."""

    def __init__(self) -> None:
        self.woken = asyncio.Event()
        self.urgent = asyncio.Event()
        self.task: asyncio.Task[None] | None = None


async def _wait(event: asyncio.Event, limit_s: float | None) -> None:
    """Until the event, or until the limit."""
    try:
        async with asyncio.timeout(limit_s):
            await event.wait()
    except TimeoutError:
        return
