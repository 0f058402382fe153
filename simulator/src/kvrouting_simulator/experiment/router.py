"""The router of a simulation: the product's policy and index, with requests and events on the virtual clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvrouting_core.blocks import ChainHasher, Namespace
from kvrouting_core.deltas import Delta
from kvrouting_core.identity import WorkerId
from kvrouting_core.prefix_index import PrefixIndex
from kvrouting_core.routing.decision import Action, Dispatch, Refusal
from kvrouting_core.routing.events import (
    Arrival,
    Ended,
    Event,
    FirstToken,
    LoadReport,
    Outcome,
    PrefixArrived,
    RoutingRequest,
    WorkerGone,
    WorkerJoined,
    WorkerPaused,
    WorkerProfile,
)
from kvrouting_core.routing.policy import Policy
from kvrouting_simulator.engine_model import TokenProduced
from kvrouting_simulator.experiment.clock import VirtualClock
from kvrouting_simulator.experiment.index_feed import apply_deltas
from kvrouting_simulator.experiment.request_lifecycle import RequestLifecycle
from kvrouting_simulator.report import RequestRecord
from kvrouting_simulator.workloads import ReadyRequest


class SimulatedRouter:
    """Holds each request from its arrival to its end and tells the policy what happens.

    resubmissions: times that a client sends a request again whose answer was cut.
    send: carries a passage to the worker of its present attempt.
    on_end: told of each record, with the answer as far as it came.
    """

    def __init__(
        self,
        *,
        policy: Policy,
        index: PrefixIndex,
        clock: VirtualClock,
        blocks: ChainHasher,
        namespace: Namespace,
        max_attempts: int,
        resubmissions: int,
        send: Callable[[RequestLifecycle, WorkerId], None],
        on_end: Callable[[RequestRecord, Sequence[int]], None],
    ) -> None:
        self._policy = policy
        self._index = index
        self._clock = clock
        self._blocks = blocks
        self._namespace = namespace
        self._max_attempts = max_attempts
        self._resubmissions = resubmissions
        self._send = send
        self._on_end = on_end
        self._lifecycles: dict[str, RequestLifecycle] = {}

    @property
    def waiting(self) -> int:
        """Requests that the policy keeps."""
        return self._policy.waiting

    @property
    def dispatched(self) -> int:
        """Requests that are with a worker."""
        return len(self._lifecycles) - self._policy.waiting

    # ---- requests ----

    def arrive(self, ready: ReadyRequest) -> None:
        """A client's request is here."""
        blocks = self._blocks.hash_blocks(self._namespace, ready.prompt).tolist()
        lifecycle = RequestLifecycle(ready=ready, blocks=blocks, arrived_ms=ready.start_ms)
        self._lifecycles[ready.request_id] = lifecycle
        self._offer(lifecycle)

    def tokens(self, produced: Sequence[TokenProduced]) -> None:
        """Tokens came back from a worker."""
        for token in produced:
            lifecycle = self._lifecycles.get(token.request_id)
            if lifecycle is None:
                continue
            lifecycle.answer.append(token.token)
            if lifecycle.first_token_ms is None:
                lifecycle.first_token_ms = self._clock.now_ms
                lifecycle.cached_tokens = token.cached_tokens
                self._tell(FirstToken(request_id=token.request_id))
            if token.finished:
                self._end(lifecycle, Outcome.COMPLETED, None)

    def failed(self, request_id: str, attempt: int) -> None:
        """The worker of an attempt is not there any more: another one gets the request, if no byte was sent yet."""
        lifecycle = self._lifecycles.get(request_id)
        if lifecycle is None or lifecycle.attempt != attempt or lifecycle.worker is None:
            return
        if lifecycle.first_token_ms is not None:
            self._cut(lifecycle)
            return
        if lifecycle.attempts == self._max_attempts:
            self._end(lifecycle, Outcome.FAILED, f"unreachable: {lifecycle.attempts} attempts failed")
            return
        self._tell(Ended(request_id=request_id, outcome=Outcome.FAILED))
        lifecycle.excluded |= {lifecycle.worker}
        lifecycle.attempt += 1
        lifecycle.worker = None
        self._offer(lifecycle)

    def _cut(self, lifecycle: RequestLifecycle) -> None:
        """The answer has begun and cannot be completed: the client may send the request again."""
        if lifecycle.resubmissions == self._resubmissions:
            self._end(lifecycle, Outcome.FAILED, "cut: the worker died after the first byte")
            return
        self._tell(Ended(request_id=lifecycle.ready.request_id, outcome=Outcome.FAILED))
        lifecycle.begin_again(now_ms=self._clock.now_ms)
        self._offer(lifecycle)

    def rejected(self, request_id: str, error: str) -> None:
        """The worker refuses the request for its own fault."""
        self._end(self._lifecycles[request_id], Outcome.REJECTED, error)

    # ---- workers ----

    def joined(self, profile: WorkerProfile, *, restarted: bool) -> None:
        """A worker is ready."""
        self._tell(WorkerJoined(profile=profile, restarted=restarted))

    def lost(self, worker: WorkerId, served: Sequence[str], *, for_good: bool) -> None:
        """A worker's engine died, and its cache with it. served: requests that it had."""
        self._index.drop(worker)
        if for_good:
            self._tell(WorkerGone(worker=worker, reason="killed"))
        else:
            self._tell(WorkerPaused(worker=worker, reason="killed"))
        for request_id in served:
            lifecycle = self._lifecycles.get(request_id)
            if lifecycle is not None and lifecycle.worker == worker:
                self.failed(request_id, lifecycle.attempt)

    def reported(self, report: LoadReport) -> None:
        """A load report came in."""
        self._tell(report)

    def cached(self, worker: WorkerId, deltas: Sequence[Delta], arrived: Sequence[str]) -> None:
        """Deltas of a worker's cache came in. arrived: requests whose whole prompt is in it since then."""
        apply_deltas(self._index, worker, deltas)
        for request_id in arrived:
            lifecycle = self._lifecycles.get(request_id)
            if lifecycle is not None and lifecycle.worker == worker:
                self._tell(PrefixArrived(request_id=request_id))

    # ---- the policy ----

    def _offer(self, lifecycle: RequestLifecycle) -> None:
        ready = lifecycle.ready
        request = RoutingRequest(
            request_id=ready.request_id,
            blocks=lifecycle.blocks,
            prompt_tokens=len(ready.prompt),
            excluded=lifecycle.excluded,
        )
        self._tell(Arrival(request=request, arrived_ms=lifecycle.arrived_ms))

    def _tell(self, event: Event) -> None:
        for action in self._policy.handle(event, now_ms=self._clock.now_ms):
            self._act(action)

    def _act(self, action: Action) -> None:
        lifecycle = self._lifecycles[action.request_id]
        if isinstance(action, Dispatch):
            lifecycle.worker = action.worker
            self._send(lifecycle, action.worker)
        else:
            self._refuse(lifecycle, action)

    def _refuse(self, lifecycle: RequestLifecycle, refusal: Refusal) -> None:
        """Nothing is reserved, so the policy hears of no end."""
        self._forget(
            lifecycle, Outcome.REJECTED, f"{refusal.reason.value}: retry after {refusal.retry_after_ms:.0f} ms"
        )

    def _end(self, lifecycle: RequestLifecycle, outcome: Outcome, error: str | None) -> None:
        self._tell(
            Ended(
                request_id=lifecycle.ready.request_id,
                outcome=outcome,
                output_tokens=len(lifecycle.answer),
                cached_tokens=lifecycle.cached_tokens if lifecycle.first_token_ms is not None else None,
            )
        )
        self._forget(lifecycle, outcome, error)

    def _forget(self, lifecycle: RequestLifecycle, outcome: Outcome, error: str | None) -> None:
        del self._lifecycles[lifecycle.ready.request_id]
        self._on_end(lifecycle.record(end_ms=self._clock.now_ms, outcome=outcome, error=error), lifecycle.answer)
