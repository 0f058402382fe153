"""Core's cache in the order of SGLang, which shows an admission no earlier than the first insert."""

from __future__ import annotations

from typing import Any

from kvrouting_core.eviction import EvictionPolicy, ExposeParent, PathAccess, TreeSite


class ToldAtTheInsert(EvictionPolicy[Any]):
    """Passes everything on, admissions with the next insert: for requests that are served one after the other."""

    def __init__(self, policy: EvictionPolicy[Any]) -> None:
        self._policy = policy
        self._admission: PathAccess[Any] | None = None

    def attached(self, site: TreeSite) -> None:
        self._policy.attached(site)

    def record(self, owner: Any, pages: int) -> Any:
        return self._policy.record(owner, pages)

    def admitted(self, access: PathAccess[Any]) -> None:
        self._admission = access

    def inserted(self, access: PathAccess[Any]) -> None:
        if self._admission is not None:
            self._policy.admitted(self._admission)
        self._admission = None
        self._policy.inserted(access)

    def split(self, record: Any, prefix_owner: Any, prefix_pages: int) -> Any:
        return self._policy.split(record, prefix_owner, prefix_pages)

    def trimmed(self, record: Any, pages: int) -> None:
        self._policy.trimmed(record, pages)

    def evictable(self, record: Any) -> None:
        self._policy.evictable(record)

    def pinned(self, record: Any) -> None:
        self._policy.pinned(record)

    def choose(self, pages: int, expose_parent: ExposeParent) -> list[tuple[Any, int]]:
        return self._policy.choose(pages, expose_parent)

    def clear(self) -> None:
        self._policy.clear()
