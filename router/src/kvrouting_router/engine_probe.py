"""Asks engines for their health: those without a sidecar all the time, those whose breaker is open when it is due."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import msgspec
from yarl import URL

from kvrouting_core.identity import WorkerId
from kvrouting_router.errors import UpstreamError
from kvrouting_router.pool import Pool
from kvrouting_router.upstream import Upstream
from kvrouting_router.worker_registry import Mirror, WorkerFacts

_ROUND_S = 0.25
_PROBE_LIMIT_S = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class StaticWorker:
    """An engine without a sidecar, named by an option. capacity_tokens: until the engine itself says it."""

    url: str
    worker_class: str
    capacity_tokens: int

    def __post_init__(self) -> None:
        url = URL(self.url)
        if url.scheme not in ("http", "https") or not url.host or url.path not in ("", "/"):
            raise ValueError(f"worker URL {self.url!r} must be http://host:port")

    def facts(self) -> WorkerFacts:
        """Its identity is its address."""
        address = URL(self.url).authority
        return WorkerFacts(
            worker=WorkerId(f"{address}/0"),
            pod_uid=address,
            dp_rank=0,
            dp_size=1,
            epoch="",
            endpoint=self.url.rstrip("/"),
            worker_class=self.worker_class,
            capacity_tokens=self.capacity_tokens,
            mirror=Mirror.APPROXIMATE,
            has_sidecar=False,
        )


class EngineProbes:
    """Runs on the event loop until cancelled."""

    def __init__(
        self,
        *,
        pool: Pool,
        upstream: Upstream,
        static_workers: Sequence[StaticWorker],
        interval_s: float,
        health_path: str,
        now_s: Callable[[], float],
    ) -> None:
        self._pool = pool
        self._upstream = upstream
        self._static = {w.facts().worker: w.facts() for w in static_workers}
        self._failing: set[WorkerId] = set()
        self._next_static_s = 0.0
        self._interval_s = interval_s
        self._health_path = health_path
        self._now_s = now_s

    async def run(self) -> None:
        """Probes for ever."""
        for facts in self._static.values():
            self._pool.introduce(facts)
        while True:
            await self.probe_once()
            await asyncio.sleep(_ROUND_S)

    async def probe_once(self) -> None:
        """One round: everything that is due, at the same time."""
        now_s = self._now_s()
        due = [w.facts for w in self._pool.registry if w.breaker.probe_is_due(now_s=now_s)]
        probes = [self._probe_open_breaker(facts) for facts in due]
        if now_s >= self._next_static_s:
            self._next_static_s = now_s + self._interval_s
            probes += [self._probe_static(facts) for facts in self._static.values() if not self._is_taken(facts)]
        async with asyncio.TaskGroup() as tasks:
            for probe in probes:
                tasks.create_task(probe)

    def _is_taken(self, facts: WorkerFacts) -> bool:
        """A sidecar speaks for the same address: it knows more."""
        return any(True for _ in self._pool.registry.sharing_endpoint(facts))

    async def _is_healthy(self, facts: WorkerFacts) -> bool:
        try:
            status, _, _ = await self._upstream.get(facts.endpoint, self._health_path, limit_s=_PROBE_LIMIT_S)
        except (UpstreamError, TimeoutError):
            return False
        return status == 200

    async def _probe_open_breaker(self, facts: WorkerFacts) -> None:
        healthy = await self._is_healthy(facts)
        worker = self._pool.registry.get(facts.worker)
        if worker is not None and worker.breaker.is_open:
            worker.breaker.probed(healthy=healthy, now_s=self._now_s())
            self._pool.refresh()

    async def _probe_static(self, facts: WorkerFacts) -> None:
        if not await self._is_healthy(facts):
            self._failing.add(facts.worker)
            return
        if facts.worker in self._failing:
            self._failing.discard(facts.worker)
            # It may have been restarted, and nobody tells: what was guessed of its cache is void.
            self._pool.guessed.drop(facts.worker)
        known = self._pool.registry.get(facts.worker)
        if known is None or not known.synced:
            facts = await self._with_capacity(facts)
            self._pool.introduce(facts)
        self._pool.last_seen(facts.worker)
        self._pool.synced(facts.worker)
        self._pool.refresh()

    async def _with_capacity(self, facts: WorkerFacts) -> WorkerFacts:
        """The capacity that the engine itself states, where it does."""
        try:
            status, _, body = await self._upstream.get(facts.endpoint, "/server_info", limit_s=_PROBE_LIMIT_S)
        except (UpstreamError, TimeoutError):
            return facts
        if status != 200:
            return facts
        try:
            info = msgspec.json.decode(body)
        except msgspec.MsgspecError:
            return facts
        tokens = info.get("max_total_num_tokens") if isinstance(info, dict) else None
        return replace(facts, capacity_tokens=tokens) if isinstance(tokens, int) and tokens > 0 else facts
