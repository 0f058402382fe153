"""API keys in a file that may change while the router runs, as a mounted Secret does."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from kvrouting_router.client_call import ApiKeys

_logger = logging.getLogger(__name__)

# A Secret takes its minute to reach the file: looking more often would make no key valid sooner.
_LOOK_EVERY_S = 1.0


def read_api_keys(path: Path) -> list[str]:
    """One key a line; empty lines and lines with # are left out. Raises: OSError; ValueError if there is none."""
    lines = (line.strip() for line in path.read_text(encoding="utf-8").splitlines())
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ValueError(f"{path} holds no API key; write one a line")
    return keys


class ApiKeysFile(ApiKeys):
    """Read anew when it has changed. A file that is gone, or holds no key, leaves the former keys in force: nobody is
    let in, and nobody is locked out, by a mistake.
    """

    def __init__(self, path: Path, *, now_s: Callable[[], float]) -> None:
        """now_s: a monotonic clock. Raises: OSError; ValueError if there is no key at the start."""
        self._path = path
        self._now_s = now_s
        self._seen = self._stamp()
        self._looked_s = now_s()
        super().__init__(read_api_keys(path))

    def check(self, authorization: str | None) -> None:
        """See ApiKeys."""
        if self._now_s() - self._looked_s >= _LOOK_EVERY_S:
            self._looked_s = self._now_s()
            self._look()
        super().check(authorization)

    def _stamp(self) -> tuple[int, int, int]:
        status = self._path.stat()
        return status.st_mtime_ns, status.st_ino, status.st_size

    def _look(self) -> None:
        try:
            stamp = self._stamp()
            if stamp == self._seen:
                return
            keys = read_api_keys(self._path)
        except (OSError, ValueError) as error:
            _logger.warning("API keys stay as they are", extra={"fields": {"reason": str(error)}})
            return
        self._seen = stamp
        self.replace(keys)
        _logger.info("API keys were read anew", extra={"fields": {"keys": len(keys)}})
