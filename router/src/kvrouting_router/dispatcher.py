"""Drives the routing policy: requests wait here for its word, and each reservation is released exactly once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from kvrouting_core.identity import WorkerId
from kvrouting_core.routing.decision import Action, Decision, Dispatch, Refusal, RefusalReason
from kvrouting_core.routing.events import (
    Arrival,
    Ended,
    Event,
    FirstToken,
    Outcome,
    PrefixArrived,
    RoutingRequest,
)
from kvrouting_core.routing.policy import Policy, WorkerBelief
from kvrouting_router.errors import NoWorkerReadyError, OverloadedError, StoppingError

InFlightListener = Callable[[int], None]


class Dispatcher:
    """The only caller of the policy. All of it runs on one event loop, each event in one synchronous step."""

    def __init__(self, policy: Policy, *, now_ms: Callable[[], float]) -> None:
        self._policy = policy
        self._now_ms = now_ms
        # Requests that the policy has not answered, by id.
        self._unanswered: dict[str, asyncio.Future[Action]] = {}
        self._dispatched: dict[str, WorkerId] = {}
        self._listeners: dict[WorkerId, list[InFlightListener]] = {}
        self._stopping = False

    @property
    def policy_name(self) -> str:
        """The policy's configured name."""
        return self._policy.name

    @property
    def waiting(self) -> int:
        """Requests in the policy's queue."""
        return self._policy.waiting

    @property
    def dispatched(self) -> int:
        """Requests on workers, all together."""
        return len(self._dispatched)

    def in_flight(self, worker: WorkerId) -> int:
        """Requests on the worker."""
        return self._policy.in_flight(worker)

    def beliefs(self) -> Sequence[WorkerBelief]:
        """What the policy believes of each worker now."""
        return self._policy.beliefs(now_ms=self._now_ms())

    def now_ms(self) -> float:
        """The clock of all events."""
        return self._now_ms()

    def tell(self, event: Event) -> None:
        """Hands an event to the policy and carries its actions out: waiting requests wake up."""
        for action in self._policy.handle(event, now_ms=self._now_ms()):
            self._answer(action)

    async def place(
        self, request: RoutingRequest, *, arrived_ms: float | None = None, deadline_s: float | None = None
    ) -> Reservation:
        """Waits until the policy gives the request a worker, or until the loop's time `deadline_s`.

        Raises: TimeoutError; NoWorkerReadyError, OverloadedError as the policy refuses; StoppingError at shutdown.
        Whatever ends the wait, also cancellation, leaves nothing reserved.
        """
        if self._stopping:
            raise StoppingError("the router is shutting down")
        future: asyncio.Future[Action] = asyncio.get_running_loop().create_future()
        self._unanswered[request.request_id] = future
        try:
            self.tell(Arrival(request=request, arrived_ms=arrived_ms))
        except BaseException:
            del self._unanswered[request.request_id]
            raise
        if not future.done():
            try:
                async with asyncio.timeout_at(deadline_s):
                    await future
            except BaseException:
                self._withdraw(request.request_id)
                raise
        action = future.result()
        if isinstance(action, Refusal):
            raise refusal_error(action)
        return Reservation(self, action)

    def stop(self) -> None:
        """Refuses what waits and what comes; running requests go on."""
        self._stopping = True
        for future in self._unanswered.values():
            if not future.done():
                future.set_exception(StoppingError("the router is shutting down"))

    def listen(self, worker: WorkerId, listener: InFlightListener) -> Callable[[], None]:
        """Calls the listener with the worker's in-flight count on each change. Returns: how to stop that."""
        listeners = self._listeners.setdefault(worker, [])
        listeners.append(listener)

        def stop() -> None:
            listeners.remove(listener)
            if not listeners:
                self._listeners.pop(worker, None)

        return stop

    def release(self, event: Ended) -> None:
        """Ends a dispatched request."""
        worker = self._dispatched.pop(event.request_id)
        self.tell(event)
        self._in_flight_changed(worker)

    def _answer(self, action: Action) -> None:
        future = self._unanswered.pop(action.request_id)
        if isinstance(action, Dispatch):
            self._dispatched[action.request_id] = action.worker
            self._in_flight_changed(action.worker)
        # A future that is done belongs to a client that left a moment ago; its withdrawal follows.
        if not future.done():
            future.set_result(action)

    def _withdraw(self, request_id: str) -> None:
        ended = Ended(request_id=request_id, outcome=Outcome.CANCELLED)
        if request_id in self._dispatched:
            self.release(ended)
        elif self._unanswered.pop(request_id, None) is not None:
            self.tell(ended)

    def _in_flight_changed(self, worker: WorkerId) -> None:
        for listener in tuple(self._listeners.get(worker, ())):
            listener(self._policy.in_flight(worker))


class Reservation:
    """A worker's place for one attempt. Leaving the context releases it if nothing else has."""

    def __init__(self, dispatcher: Dispatcher, dispatch: Dispatch) -> None:
        self._dispatcher = dispatcher
        self._open = True
        self._prefix_is_pending = True
        self._has_first_token = False
        self.request_id = dispatch.request_id
        self.worker = dispatch.worker
        self.decision: Decision = dispatch.decision
        self.matched_tokens = dispatch.decision.chosen.matched_tokens

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        left = kind is not None and issubclass(kind, (asyncio.CancelledError, ConnectionError, GeneratorExit))
        self.end(Outcome.CANCELLED if left else Outcome.FAILED)

    @property
    def is_open(self) -> bool:
        """Nothing has released it."""
        return self._open

    def first_token(self) -> None:
        """The first token came back; later calls change nothing."""
        if self._open and not self._has_first_token:
            self._has_first_token = True
            self._dispatcher.tell(FirstToken(request_id=self.request_id))

    def prefix_arrived(self) -> None:
        """The index shows the prefix; later calls, and calls after the end, change nothing."""
        if self._open and self._prefix_is_pending:
            self._prefix_is_pending = False
            self._dispatcher.tell(PrefixArrived(request_id=self.request_id))

    def end(self, outcome: Outcome, *, output_tokens: int | None = None, cached_tokens: int | None = None) -> bool:
        """Releases the place. The first call counts. Returns: whether this was it."""
        if not self._open:
            return False
        self._open = False
        self._dispatcher.release(
            Ended(
                request_id=self.request_id,
                outcome=outcome,
                output_tokens=output_tokens,
                cached_tokens=cached_tokens,
            )
        )
        return True


def refusal_error(refusal: Refusal) -> NoWorkerReadyError | OverloadedError:
    """A refusal as the error that the client gets."""
    if refusal.reason is RefusalReason.NO_WORKER:
        return NoWorkerReadyError("no worker is ready to take this request")
    retry_after_s = refusal.retry_after_ms / 1000
    return OverloadedError(
        f"every worker is past its limit; try again in {retry_after_s:.1f} s", retry_after_s=retry_after_s
    )
