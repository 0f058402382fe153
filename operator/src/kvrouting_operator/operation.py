"""The operator at work: what the watch tells wakes a pool, and every so often all of them are looked at."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from typing import Any, TypeVar

from kvrouting_operator.cluster import Cluster, ClusterError, NotFoundError, RejectedError, UnavailableError
from kvrouting_operator.crd import CRD_NAME, KIND, custom_resource_definition
from kvrouting_operator.observed import has_condition
from kvrouting_operator.pool import Object, PoolKey
from kvrouting_operator.reconcile import Outcome, Reconciler
from kvrouting_operator.resources.names import CRD_FIELD_MANAGER, POOL_LABEL
from kvrouting_operator.settings import OperatorSettings
from kvrouting_operator.watch_silence import WatchSilence
from kvrouting_operator.work_queue import WorkQueue

_logger = logging.getLogger(__name__)
_Result = TypeVar("_Result")

# Between two looks for the CRD: it takes a moment after it was made, longer while rights or the API server are missing.
_FIRST_PAUSE_S = 0.25
_LONGEST_PAUSE_S = 5.0


class Operation:
    """Belongs to one event loop; the cluster is asked in the executor's threads. now_s: a monotonic clock."""

    def __init__(
        self,
        *,
        settings: OperatorSettings,
        cluster: Cluster,
        reconciler: Reconciler,
        executor: Executor,
        queue: Callable[[Callable[[PoolKey], Any]], WorkQueue],
        now_s: Callable[[], float],
    ) -> None:
        self._settings = settings
        self._cluster = cluster
        self._reconciler = reconciler
        self._executor = executor
        self._now_s = now_s
        self._silence = WatchSilence(limit_s=settings.silence_limit_s)
        self._generations: dict[str, tuple[object, ...]] = {}
        self._resync: asyncio.Task[None] | None = None
        self._looked_s = now_s()
        self.queue = queue(self._round)
        # What keeps the operator from its whole work, each empty if nothing does.
        self._unlisted = "pools have not been listed yet"
        self._refused = ""
        self._watch_ended = ""
        self._watches = 0  # begun so far
        self._is_watching = False

    async def start(self) -> None:
        """Brings the CRD up to date, waits until pools can be listed, and begins the regular looks."""
        await self._until_listable()
        self._resync = asyncio.create_task(self._look_again_and_again(), name="resync")

    async def stop(self) -> None:
        """Ends everything that runs."""
        if self._resync is not None:
            self._resync.cancel()
            await asyncio.gather(self._resync, return_exceptions=True)
        await self.queue.close()

    def pool_changed(self, kind: str | None, raw: Mapping[str, Any]) -> None:
        """The watch has shown a pool. kind: ADDED, MODIFIED, DELETED, or None from the first list."""
        metadata = raw["metadata"]
        self._silence.seen(metadata)
        self._watch_works()
        # Its status is our own writing, and wakes nothing.
        essence = (metadata.get("generation"), metadata.get("deletionTimestamp"), kind == "DELETED")
        if self._generations.get(metadata["uid"]) == essence:
            return
        self._generations[metadata["uid"]] = essence
        if kind == "DELETED":
            del self._generations[metadata["uid"]]
        self.queue.wake(PoolKey(namespace=metadata["namespace"], name=metadata["name"]), urgent=True)

    def owned_changed(self, raw: Mapping[str, Any]) -> None:
        """The watch has shown a Deployment or a pod with a pool's label."""
        metadata = raw["metadata"]
        self._watch_works()
        name = metadata.get("labels", {}).get(POOL_LABEL)
        if name:
            self.queue.wake(PoolKey(namespace=metadata["namespace"], name=name))

    def watch_began(self) -> None:
        """The watches are begun. One that has failed is believed when it shows something, or when it has lasted over a
        whole look.
        """
        self._watches += 1
        self._is_watching = True

    def watch_ended(self, reason: str) -> None:
        """The watches are away for a while."""
        self._is_watching = False
        self._watch_ended = f"the watch has ended and is begun anew: {reason}"

    def _watch_works(self) -> None:
        if self._is_watching:
            self._watch_ended = ""

    def why_not_ready(self) -> str:
        """What keeps the operator from its whole work; empty: nothing. Pools are looked at regularly all the same."""
        return self._unlisted or self._refused or self._watch_ended

    def why_not_alive(self) -> str:
        """Why this process should be started anew; empty: it should not. An API server that is away or refuses the
        watch is no reason: another process would fare no better.
        """
        now_s = self._now_s()
        if self._silence.is_silent(now_s=now_s) and not self._refused:
            return f"the watch has been silent for {self._silence.silent_for_s(now_s=now_s):.0f} s"
        late_s = now_s - self._looked_s
        if late_s > 3 * self._settings.resync_s + 4 * self._settings.api_limit_s:
            return f"the last regular look was {late_s:.0f} s ago"
        return ""

    async def _round(self, key: PoolKey) -> Outcome | None:
        return await self._in_thread(lambda: self._reconciler.reconcile(key))

    async def _look_again_and_again(self) -> None:
        while True:
            await self._look()
            self._looked_s = self._now_s()
            await asyncio.sleep(self._settings.resync_s)

    async def _look(self) -> None:
        """At all pools, and whether they may be watched."""
        watches = self._watches if self._is_watching else 0
        try:
            pools = await self._in_thread(self._list_pools)
        except ClusterError as error:
            _logger.warning("pools cannot be listed", extra={"fields": {"error": str(error)}})
            self._unlisted = f"pools cannot be listed: {error}"
            return
        self._unlisted = ""
        self._silence.listed(pools, now_s=self._now_s())
        for pool in pools:
            self.queue.wake(PoolKey(namespace=pool["metadata"]["namespace"], name=pool["metadata"]["name"]))
        refused = await self._in_thread(self._why_watch_is_refused)
        if refused and refused != self._refused:
            _logger.warning("the watch is refused", extra={"fields": {"error": refused}})
        self._refused = refused
        if watches == self._watches and not refused:
            self._watch_works()

    def _why_watch_is_refused(self) -> str:
        """In the server's words; empty if it is not, or if nobody says."""
        try:
            for namespace in self._settings.namespaces or (None,):
                self._cluster.check_watch(KIND, namespace)
                for kind in ("Deployment", "Pod"):
                    self._cluster.check_watch(kind, namespace, selector=POOL_LABEL)
        except (RejectedError, NotFoundError) as error:
            return f"the watch is refused: {error}"
        except UnavailableError:
            return self._refused
        return ""

    def _list_pools(self) -> list[Object]:
        namespaces = self._settings.namespaces or (None,)
        return [pool for namespace in namespaces for pool in self._cluster.find(KIND, namespace)]

    def _apply_crd(self) -> None:
        """Only this one object is forced: it is the operator's own, whoever brought an earlier version."""
        try:
            self._cluster.apply(custom_resource_definition(), force=True, manager=CRD_FIELD_MANAGER)
        except RejectedError as error:
            _logger.warning("the CRD cannot be updated", extra={"fields": {"error": str(error)}})

    async def _until_listable(self) -> None:
        """A new CRD is served a moment after it is there; an API server that is away, and rights, are waited for."""
        applied, pause_s = False, _FIRST_PAUSE_S
        while True:
            try:
                if self._settings.apply_crd and not applied:
                    await self._in_thread(self._apply_crd)
                    applied = True
                if self._settings.apply_crd:
                    await self._in_thread(self._check_crd)
                await self._in_thread(self._list_pools)
            except ClusterError as error:
                _logger.warning("waits for the CRD", extra={"fields": {"error": str(error)}})
                self._looked_s = self._now_s()
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            else:
                return

    def _check_crd(self) -> None:
        """Raises: UnavailableError while the CRD is not served."""
        try:
            crd = self._cluster.get("CustomResourceDefinition", None, CRD_NAME)
        except RejectedError:
            return  # it must not be read: the list of pools will tell
        if crd is None or not has_condition(crd, "Established"):
            raise UnavailableError("the CRD is not served yet")

    async def _in_thread(self, work: Callable[[], _Result]) -> _Result:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)
