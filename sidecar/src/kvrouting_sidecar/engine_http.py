"""The engine's HTTP side: who it is, and whether it is well."""

from __future__ import annotations

import asyncio
import logging

import aiohttp

from kvrouting_sidecar.engine_info import EngineInfo, EngineInfoError, parse_engine_info

_log = logging.getLogger(__name__)

_DESCRIBE_LIMIT = aiohttp.ClientTimeout(total=5)
_HEALTH_LIMIT = aiohttp.ClientTimeout(total=5)


class EngineHttp:
    """Asks one engine; every question has a limit and no failure is an exception."""

    def __init__(self, client: aiohttp.ClientSession, *, url: str) -> None:
        self._client = client
        self._url = url.rstrip("/")
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

    async def watch_health(self, *, every_s: float) -> None:
        """Ask `GET /health` until cancelled."""
        while True:
            healthy = await self._is_healthy()
            if healthy != self.healthy:
                _log.info("engine health changed", extra={"healthy": healthy})
            self.healthy = healthy
            await asyncio.sleep(every_s)

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
