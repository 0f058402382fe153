"""What one rank tells of itself: the answers of its state socket."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvrouting_core.eviction import GuardedEviction, RandomizedLeafTokens
from kvrouting_sglang.tree_reader import TreeReader

if TYPE_CHECKING:
    from kvrouting_sglang.cache import PolicyRadixCache

_VERSION = 1
_PAGES_PER_CHUNK = 512


@dataclass(frozen=True, kw_only=True)
class RankIdentity:
    """epoch: new for each process. seed: of the policy's coins, the same on all tensor-parallel ranks.

    events_port: where the rank publishes its events; None: it publishes none.
    """

    epoch: str
    dp_rank: int
    events_port: int | None
    policy: str
    seed: int


class EngineState:
    """Answers `state` and `snapshot` from any thread."""

    def __init__(
        self,
        cache: PolicyRadixCache,
        *,
        identity: RankIdentity,
        reader: TreeReader,
    ) -> None:
        self._cache = cache
        self._tree = cache.tree_core
        self._identity = identity
        self._reader = reader

    def state(self) -> Iterator[dict[str, Any]]:
        """One answer. Without KV events the engine hashes no pages: position, count and digest are left out."""
        position = self._tree.kv_events.published
        yield {
            "version": _VERSION,
            "epoch": self._identity.epoch,
            "dp_rank": self._identity.dp_rank,
            "page_size": self._tree.page_size,
            **(position._asdict() if self._tree.kv_events.enabled else {}),
            "capacity_tokens": self._cache.token_to_kv_pool_allocator.size,
            "cached_tokens": sum(self._tree_sizes()),
            "events_port": self._identity.events_port,
            "eviction": self._eviction(),
        }

    def snapshot(self) -> Iterator[dict[str, Any]]:
        """The tree in chunks, all with the position that stood when the first one was asked for."""
        if not self._tree.kv_events.enabled:
            yield {"error": "the engine hashes no pages: start it with --kv-events-config"}
            return
        head = {"epoch": self._identity.epoch, "position": self._tree.kv_events.published.sequence}
        chunk: list[Any] = []
        pages = 0
        for events in self._reader.snapshot():
            chunk += events
            pages += sum(len(event.block_hashes) for event in events)
            if pages >= _PAGES_PER_CHUNK:
                yield {**head, "events": chunk}
                chunk, pages = [], 0
        yield {**head, "events": chunk}

    def _tree_sizes(self) -> tuple[int, int]:
        return self._tree.evictable_size(), self._tree.protected_size()

    def _eviction(self) -> dict[str, Any]:
        told: dict[str, Any] = {
            "policy": self._identity.policy,
            "live": self._cache.tree_core.is_bound,
            "seed": self._identity.seed,
            "evicted_tokens": self._tree.evicted_tokens,
        }
        policy = self._tree.policy
        if isinstance(policy, RandomizedLeafTokens):
            told["phase"] = policy.phase
            told["marked_tokens"] = policy.marked_pages * self._tree.page_size
        if isinstance(policy, GuardedEviction):
            told.update(policy.figures())
        return told
