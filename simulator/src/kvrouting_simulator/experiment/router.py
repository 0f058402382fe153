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
from kvrouting_simulator.experiment.passage import Passage
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
        send: Callable[[Passage, WorkerId], None],
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
        self._passages: dict[str, Passage] = {}

    @property
    def waiting(self) -> int:
        """Requests that the policy keeps."""
        return self._policy.waiting

    @property
    def dispatched(self) -> int:
        """Requests that are with a worker."""
        return len(self._passages) - self._policy.waiting

    # ---- requests ----

    def arrive(self, ready: ReadyRequest) -> None:
        """A client's request is here."""
        blocks = self._blocks.hash_blocks(self._namespace, ready.prompt).tolist()
        passage = Passage(ready=ready, blocks=blocks, arrived_ms=ready.start_ms)
        self._passages[ready.request_id] = passage
        self._offer(passage)

    def tokens(self, produced: Sequence[TokenProduced]) -> None:
        """Tokens came back from a worker."""
        for token in produced:
            passage = self._passages.get(token.request_id)
            if passage is None:
                continue
            passage.answer.append(token.token)
            if passage.first_token_ms is None:
                passage.first_token_ms = self._clock.now_ms
                passage.cached_tokens = token.cached_tokens
                self._tell(FirstToken(request_id=token.request_id))
            if token.finished:
                self._end(passage, Outcome.COMPLETED, None)

    def failed(self, request_id: str, attempt: int) -> None:
        """The worker of an attempt is not there any more: another one gets the request, if no byte was sent yet."""
        passage = self._passages.get(request_id)
        if passage is None or passage.attempt != attempt or passage.worker is None:
            return
        if passage.first_token_ms is not None:
            self._cut(passage)
            return
        if passage.attempts == self._max_attempts:
            self._end(passage, Outcome.FAILED, f"unreachable: {passage.attempts} attempts failed")
            return
        self._tell(Ended(request_id=request_id, outcome=Outcome.FAILED))
        passage.excluded |= {passage.worker}
        passage.attempt += 1
        passage.worker = None
        self._offer(passage)

    def _cut(self, passage: Passage) -> None:
        """The answer has begun and cannot be completed: the client may send the request again."""
        if passage.resubmissions == self._resubmissions:
            self._end(passage, Outcome.FAILED, "cut: the worker died after the first byte")
            return
        self._tell(Ended(request_id=passage.ready.request_id, outcome=Outcome.FAILED))
        passage.begin_again(now_ms=self._clock.now_ms)
        self._offer(passage)

    def rejected(self, request_id: str, error: str) -> None:
        """The worker refuses the request for its own fault."""
        self._end(self._passages[request_id], Outcome.REJECTED, error)

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
            passage = self._passages.get(request_id)
            if passage is not None and passage.worker == worker:
                self.failed(request_id, passage.attempt)

    def reported(self, report: LoadReport) -> None:
        """A load report came in."""
        self._tell(report)

    def cached(self, worker: WorkerId, deltas: Sequence[Delta], arrived: Sequence[str]) -> None:
        """Deltas of a worker's cache came in. arrived: requests whose whole prompt is in it since then."""
        apply_deltas(self._index, worker, deltas)
        for request_id in arrived:
            passage = self._passages.get(request_id)
            if passage is not None and passage.worker == worker:
                self._tell(PrefixArrived(request_id=request_id))

    # ---- the policy ----

    def _offer(self, passage: Passage) -> None:
        ready = passage.ready
        request = RoutingRequest(
            request_id=ready.request_id,
            blocks=passage.blocks,
            prompt_tokens=len(ready.prompt),
            excluded=passage.excluded,
        )
        self._tell(Arrival(request=request, arrived_ms=passage.arrived_ms))

    def _tell(self, event: Event) -> None:
        for action in self._policy.handle(event, now_ms=self._clock.now_ms):
            self._act(action)

    def _act(self, action: Action) -> None:
        passage = self._passages[action.request_id]
        if isinstance(action, Dispatch):
            passage.worker = action.worker
            self._send(passage, action.worker)
        else:
            self._refuse(passage, action)

    def _refuse(self, passage: Passage, refusal: Refusal) -> None:
        """Nothing is reserved, so the policy hears of no end."""
        self._forget(passage, Outcome.REJECTED, f"{refusal.reason.value}: retry after {refusal.retry_after_ms:.0f} ms")

    def _end(self, passage: Passage, outcome: Outcome, error: str | None) -> None:
        self._tell(
            Ended(
                request_id=passage.ready.request_id,
                outcome=outcome,
                output_tokens=len(passage.answer),
                cached_tokens=passage.cached_tokens if passage.first_token_ms is not None else None,
            )
        )
        self._forget(passage, outcome, error)

    def _forget(self, passage: Passage, outcome: Outcome, error: str | None) -> None:
        del self._passages[passage.ready.request_id]
        self._on_end(passage.record(end_ms=self._clock.now_ms, outcome=outcome, error=error), passage.answer)
