"""Whether the watch still brings news: what a list has shown, the watch must show as well, within a limit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class _Awaited:
    version: int
    since_s: float


class WatchSilence:
    """Two signals for the same objects: lists, asked for by us, and the watch. Times are a monotonic clock's
    seconds.
    """

    def __init__(self, *, limit_s: float) -> None:
        if limit_s <= 0:
            raise ValueError(f"limit_s must be positive, got {limit_s}")
        self._limit_s = limit_s
        self._seen: dict[str, int] = {}
        self._awaited: dict[str, _Awaited] = {}

    def listed(self, objects: Iterable[Mapping[str, Any]], *, now_s: float) -> None:
        """A complete list: whatever is not in it need not be shown any more."""
        versions = {o["metadata"]["uid"]: int(o["metadata"]["resourceVersion"]) for o in objects}
        self._seen = {uid: version for uid, version in self._seen.items() if uid in versions}
        self._awaited = {uid: awaited for uid, awaited in self._awaited.items() if uid in versions}
        for uid, version in versions.items():
            if self._seen.get(uid, 0) < version and uid not in self._awaited:
                self._awaited[uid] = _Awaited(version=version, since_s=now_s)

    def seen(self, metadata: Mapping[str, Any]) -> None:
        """The watch has shown an object."""
        uid, version = metadata["uid"], int(metadata["resourceVersion"])
        self._seen[uid] = max(version, self._seen.get(uid, 0))
        awaited = self._awaited.get(uid)
        if awaited is not None and awaited.version <= version:
            del self._awaited[uid]

    def silent_for_s(self, *, now_s: float) -> float:
        """For how long the watch owes an object that a list has shown; 0: it owes none."""
        return max((now_s - awaited.since_s for awaited in self._awaited.values()), default=0.0)

    def is_silent(self, *, now_s: float) -> bool:
        """Whether that is too long."""
        return self.silent_for_s(now_s=now_s) > self._limit_s
