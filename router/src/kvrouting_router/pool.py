"""The pool as one router sees it: registry, cache views and policy kept in step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from kvrouting_core.event_order import FencingDecision, HandshakeResult, SyncOrder
from kvrouting_core.identity import WorkerId
from kvrouting_core.prefix_index import PrefixIndex
from kvrouting_core.routing.events import LoadReport, RoutingRequest, WorkerGone, WorkerJoined, WorkerPaused
from kvrouting_core.service_time import StepTimes
from kvrouting_router.dispatcher import Dispatcher, Reservation
from kvrouting_router.guessed_cache import GuessedCache, PoolCache
from kvrouting_router.metrics import RouterMetrics
from kvrouting_router.prompt_reading import ReadPrompt
from kvrouting_router.worker_registry import (
    Mirror,
    Transition,
    Vitals,
    Worker,
    WorkerFacts,
    WorkerRegistry,
    WorkerState,
)

TransitionListener = Callable[[Transition], None]


class ViewStream(Protocol):
    """The open sync stream of a worker, as far as others may use it."""

    def request_snapshot(self, reason: str) -> None:
        """The view is in doubt."""

    @property
    def is_applying(self) -> bool:
        """A message is half applied: the view may contradict itself for this moment."""

    def end(self, reason: str) -> None:
        """Nothing it says is heard any more: the sidecar must open another one."""


class Pool:
    """All mutable knowledge of workers, changed on the event loop alone.

    class_times: of worker classes that were measured here; the others are built in.
    """

    def __init__(
        self,
        *,
        dispatcher: Dispatcher,
        registry: WorkerRegistry,
        index: PrefixIndex,
        guessed: GuessedCache,
        metrics: RouterMetrics,
        now_s: Callable[[], float],
        block_size_tokens: int,
        class_times: Mapping[str, StepTimes] | None = None,
    ) -> None:
        self._class_times = class_times or {}
        self.dispatcher = dispatcher
        self.registry = registry
        self.index = index
        self.guessed = guessed
        self._cache = PoolCache(exact=index, guessed=guessed)
        self.order = SyncOrder()
        self._metrics = metrics
        self._now_s = now_s
        self._block_size_tokens = block_size_tokens
        self._streams: dict[WorkerId, ViewStream] = {}
        self._known_to_policy: set[WorkerId] = set()
        # Requests past their first token whose prefix the index does not show yet: last block → by request.
        self._awaited: dict[WorkerId, dict[str, tuple[int, Reservation]]] = {}
        self._listeners: list[TransitionListener] = []

    def on_transition(self, listener: TransitionListener) -> None:
        """Tells the listener of each change of state."""
        self._listeners.append(listener)

    # --- workers ---

    def hello(self, facts: WorkerFacts) -> HandshakeResult:
        """A stream opens. A refused one (late, of a process or pod that is gone) changes nothing."""
        handshake = self.order.hello(facts.worker, facts.epoch)
        if handshake.stream is None:
            self._metrics.fenced.inc()
            return handshake
        self.introduce(facts, restarted=handshake.decision is FencingDecision.RESTART)
        return handshake

    def introduce(self, facts: WorkerFacts, *, restarted: bool = False) -> Worker:
        """Takes a worker in. One that had its address before is gone; an earlier epoch's tree is dropped at once."""
        for other in self.registry.sharing_endpoint(facts):
            other.left = f"{facts.worker} has taken over {facts.endpoint}"
            self.order.leave(other.facts.worker, for_good=True)
        known = self.registry.get(facts.worker)
        if known is not None and known.facts.epoch != facts.epoch:
            self._forget_views(facts.worker)
            if facts.worker in self._known_to_policy:
                self.dispatcher.tell(WorkerPaused(worker=facts.worker, reason="its engine has restarted"))
        worker = self.registry.introduce(facts, now_s=self._now_s())
        worker.restarted = worker.restarted or restarted
        self.refresh()
        return worker

    def stream_opened(self, worker: WorkerId, stream: ViewStream) -> None:
        """This stream now speaks for the worker; an earlier one ends."""
        former = self._streams.get(worker)
        self._streams[worker] = stream
        if former is not None:
            former.end(f"another stream of {worker} has taken over")

    def stream_closed(self, worker: WorkerId, stream: ViewStream, *, reason: str) -> None:
        """A stream ended. Nothing follows from it at once but the end of a drain: silence decides."""
        if self._streams.get(worker) is not stream:
            return
        del self._streams[worker]
        self.index.abandon_snapshot(worker)
        known = self.registry.get(worker)
        if known is not None and known.draining:
            known.left = f"drained ({reason})"
            self.refresh()

    def last_seen(self, worker: WorkerId, vitals: Vitals | None = None) -> None:
        """The worker gave a sign of life; its load goes to the policy."""
        known = self.registry.get(worker)
        if known is None:
            return
        known.last_seen_s = self._now_s()
        if vitals is not None:
            known.vitals = vitals
            if vitals.load is not None and worker in self._known_to_policy:
                self.dispatcher.tell(self._load_report(worker, vitals))
            self.refresh()

    def synced(self, worker: WorkerId) -> None:
        """The view of the worker is complete."""
        known = self.registry.get(worker)
        if known is not None and not known.synced:
            known.synced = True
            self.refresh()

    def drain(self, worker: WorkerId, reason: str) -> None:
        """The worker wants no new requests."""
        known = self.registry.get(worker)
        if known is not None:
            known.draining = f"draining: {reason}" if reason else "draining"
            self.refresh()

    def refresh(self) -> None:
        """Derives all states anew and tells the policy; also called by a timer, for time itself changes states."""
        for change in self.registry.refresh(now_s=self._now_s()):
            self._tell_policy(change)
            for listener in self._listeners:
                listener(change)

    def _tell_policy(self, change: Transition) -> None:
        worker = change.worker.facts.worker
        if change.new is WorkerState.LIVE:
            self._known_to_policy.add(worker)
            restarted, change.worker.restarted = change.worker.restarted, False
            facts = change.worker.facts
            profile = replace(facts.profile, times=self._class_times.get(facts.worker_class))
            self.dispatcher.tell(WorkerJoined(profile=profile, restarted=restarted))
        elif change.new is WorkerState.GONE:
            self._forget_views(worker)
            self.order.leave(worker, for_good=False)
            stream = self._streams.pop(worker, None)
            if stream is not None:
                stream.end(f"{worker} is gone: {change.reason}")
            if worker in self._known_to_policy:
                self._known_to_policy.discard(worker)
                self.dispatcher.tell(WorkerGone(worker=worker, reason=change.reason))
        elif change.old is WorkerState.LIVE:
            self.dispatcher.tell(WorkerPaused(worker=worker, reason=change.reason))

    def _forget_views(self, worker: WorkerId) -> None:
        self.index.drop(worker)
        self.guessed.drop(worker)
        self._awaited.pop(worker, None)

    def _load_report(self, worker: WorkerId, vitals: Vitals) -> LoadReport:
        load = vitals.load
        if load is None:
            raise ValueError(f"no load was reported by {worker}")
        return LoadReport(
            worker=worker,
            reported_ms=self.dispatcher.now_ms() - load.age_s * 1000,
            running_requests=load.running_requests,
            waiting_requests=load.waiting_requests,
            used_tokens=load.used_tokens,
            waiting_uncached_tokens=load.waiting_uncached_tokens,
            total_prefill_uncached_tokens=load.total_prefill_uncached_tokens,
            total_prefill_busy_us=load.total_prefill_busy_us,
        )

    # --- requests ---

    def attempt_failed(self, worker: WorkerId, reason: str) -> None:
        """An attempt failed by the worker's fault."""
        known = self.registry.get(worker)
        if known is not None:
            known.breaker.failed(reason, now_s=self._now_s())
            self.refresh()

    def attempt_succeeded(self, worker: WorkerId) -> None:
        """The worker answered, were it with a 4xx."""
        known = self.registry.get(worker)
        if known is not None:
            was_open = known.breaker.is_open
            known.breaker.succeeded()
            if was_open:
                self.refresh()

    def prefilled(self, reservation: Reservation, prompt: ReadPrompt) -> None:
        """The first token came, so the prompt is cached there: guessed views learn it, exact ones are awaited."""
        known = self.registry.get(reservation.worker)
        if known is None or not prompt.blocks:
            return
        if known.mirror is Mirror.APPROXIMATE or not prompt.exact:
            capacity = max(1, known.facts.capacity_tokens // self._block_size_tokens)
            self.guessed.served(reservation.worker, prompt.blocks, capacity_blocks=capacity)
            reservation.prefix_arrived()
            return
        if self.holds(reservation.worker, prompt.blocks[-1]):
            reservation.prefix_arrived()
        else:
            awaited = self._awaited.setdefault(reservation.worker, {})
            awaited[reservation.request_id] = (prompt.blocks[-1], reservation)

    def stop_awaiting(self, reservation: Reservation) -> None:
        """The request has ended, or its prefix had its time to arrive."""
        awaited = self._awaited.get(reservation.worker)
        if awaited is not None:
            awaited.pop(reservation.request_id, None)

    def view_grew(self, worker: WorkerId) -> None:
        """A delta was applied: prefixes that were awaited may be there."""
        awaited = self._awaited.get(worker)
        if not awaited:
            return
        for request_id, (block, reservation) in tuple(awaited.items()):
            if self.holds(worker, block):
                del awaited[request_id]
                reservation.prefix_arrived()

    def holds(self, worker: WorkerId, block: int) -> bool:
        """Whether the exact view of the worker has the block."""
        return self.index.holds(worker, block)

    def matched_tokens(self, worker: WorkerId, request: RoutingRequest) -> int:
        """Prompt tokens that the worker can reuse by the views: whole pages, and one token is left to compute."""
        blocks = self._cache.match(request.blocks).get(worker, 0)
        tokens = min(blocks * self._block_size_tokens, request.prompt_tokens - 1)
        known = self.registry.get(worker)
        return tokens - tokens % max(1, known.facts.page_size_tokens) if known else tokens

    def account(self, reservation: Reservation, *, reported_cached_tokens: int | None, single: bool) -> None:
        """Keeps the sums that the pages show, and whether prediction and report agree."""
        known = self.registry.get(reservation.worker)
        if known is None:
            return
        decision = reservation.decision
        known.prompt_tokens += decision.prompt_tokens
        known.matched_tokens += reservation.matched_tokens
        if reported_cached_tokens is None:
            return
        known.reported_cached_tokens += reported_cached_tokens
        if single:
            known.agreement.observe(
                matched_tokens=reservation.matched_tokens,
                credited_tokens=max(reservation.matched_tokens, decision.chosen.credited_tokens),
                reported_tokens=reported_cached_tokens,
                prompt_tokens=decision.prompt_tokens,
            )

    def audit(self, blocks: Sequence[int]) -> None:
        """Compares the bisection with the plain walk; a worker whose view contradicts itself is synced anew."""
        self._metrics.audits.inc()
        for worker, (matched, walked) in self.index.audit(blocks).items():
            stream = self._streams.get(worker)
            if stream is None or stream.is_applying:
                continue
            self._metrics.drifts.inc()
            stream.request_snapshot(f"audit: {matched} blocks by bisection, {walked} by walking")
