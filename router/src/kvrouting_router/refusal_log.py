"""Log lines of workers that were refused: each host's reason now and then, however often it comes back."""

from __future__ import annotations

import logging
from collections.abc import Callable

_logger = logging.getLogger(__name__)

# A refused sidecar comes again every few seconds, for as long as nobody mends it.
_AGAIN_AFTER_S = 60.0
_KEPT = 1024


class RefusalLog:
    """now_s: a monotonic clock."""

    def __init__(self, *, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        # (host, reason) → when it was told, and how often it came since; the least recently told first.
        self._told: dict[tuple[str, str], tuple[float, int]] = {}

    def tell(self, reason: str, *, peer: str) -> None:
        """Writes a line, unless the same was written less than a minute ago. peer: address and port, as gRPC has it."""
        key = (peer.rpartition(":")[0], reason)
        told_s, since = self._told.get(key, (None, 0))
        now_s = self._now_s()
        if told_s is not None and now_s < told_s + _AGAIN_AFTER_S:
            self._told[key] = (told_s, since + 1)
            return
        self._told.pop(key, None)
        self._told[key] = (now_s, 0)
        if len(self._told) > _KEPT:
            del self._told[next(iter(self._told))]
        fields: dict[str, object] = {"reason": reason, "peer": peer}
        if since:
            fields["times_since_the_last_line"] = since
        _logger.warning("worker refused", extra={"fields": fields})
