"""The engine's HTTP side: who it is, and whether it is well."""

from __future__ import annotations

import asyncio
import logging
import math
from dataclasses import dataclass

import aiohttp

from kvrouting_sidecar.engine_info import EngineInfo, EngineInfoError, parse_engine_info

_log = logging.getLogger(__name__)

_DESCRIBE_LIMIT = aiohttp.ClientTimeout(total=5)
_HEALTH_LIMIT = aiohttp.ClientTimeout(total=5)


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineTimes:
    """Seconds between two questions. healthy_s: while all is well. away_s: while the engine is not there or not well:
    each second until its return is noticed is one in which it serves nobody.
    """

    healthy_s: float = 2.0
    away_s: float = 0.2

    def __post_init__(self) -> None:
        if not 0 < self.away_s <= self.healthy_s < math.inf:
            raise ValueError(
                f"pauses of {self.away_s} s and {self.healthy_s} s: the first must be above 0 and no longer"
            )


class EngineHttp:
    """Asks one engine; every question has a limit and no failure is an exception."""

    def __init__(self, client: aiohttp.ClientSession, *, url: str, times: EngineTimes) -> None:
        self._client = client
        self._url = url.rstrip("/")
        self._times = times
        self._last_failure = ""
        self.healthy = False
        self.latest: EngineInfo | None = None

    async def describe(self) -> EngineInfo | None:
        """`GET /server_info`; None if it does not answer, or not with a description."""
        try:
            async with self._client.get(f"{self._url}/server_info", timeout=_DESCRIBE_LIMIT) as answer:
                if answer.status != 200:
                    self._note_failure(f"/server_info answered {answer.status}")
                    return None
                self.latest = parse_engine_info(await answer.json())
        except (aiohttp.ClientError, TimeoutError, EngineInfoError, ValueError) as error:
            self._note_failure(str(error) or type(error).__name__)
            return None
        self._last_failure = ""
        return self.latest

    @property
    def trouble(self) -> str:
        """Why it has not described itself; empty if it has, or was not asked yet."""
        return self._last_failure

    @property
    def pause_s(self) -> float:
        """Until the engine is asked again."""
        return self._times.healthy_s if self.healthy else self._times.away_s

    async def watch_health(self) -> None:
        """Ask `GET /health` until cancelled."""
        while True:
            healthy = await self._is_healthy()
            if healthy != self.healthy:
                _log.info("engine health changed", extra={"healthy": healthy})
            self.healthy = healthy
            await asyncio.sleep(self.pause_s)

    async def _is_healthy(self) -> bool:
        try:
            async with self._client.get(f"{self._url}/health", timeout=_HEALTH_LIMIT) as answer:
                return answer.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    def _note_failure(self, reason: str) -> None:
        if reason != self._last_failure:
            _log.info("the engine does not describe itself", extra={"url": self._url, "reason": reason})
        self._last_failure = reason
