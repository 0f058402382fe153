"""The client of a fixed workload: each item at its planned time, and never before the item it depends on ended."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from kvrouting_simulator.workloads.work_item import ReadyRequest, WorkItem, Workload


class ScheduledClient:
    """Sends the items of a workload; a turn is built from the prompt and the answer before it."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._followers: dict[str, list[WorkItem]] = {}
        for item in workload.items:
            if item.depends_on is not None:
                self._followers.setdefault(item.depends_on, []).append(item)
        self._under_way: dict[str, array[int]] = {}

    def begin(self) -> Sequence[ReadyRequest]:
        """The items that depend on none."""
        return [
            self._ready(item, item.tokens, item.arrival_ms) for item in self._workload.items if item.depends_on is None
        ]

    def ended(self, request_id: str, answer: Sequence[int], *, now_ms: float) -> Sequence[ReadyRequest]:
        """The items that waited for this one; what they continue is its prompt and its answer.

        Raises: ValueError if the request is not under way.
        """
        prompt = self._under_way.pop(request_id, None)
        if prompt is None:
            raise ValueError(f"request {request_id} is not under way")
        released = []
        for item in self._followers.get(request_id, ()):
            tokens = prompt + array("I", answer) + item.tokens if item.continues else item.tokens
            released.append(self._ready(item, tokens, max(item.arrival_ms, now_ms + item.think_ms)))
        return released

    def _ready(self, item: WorkItem, prompt: array[int], start_ms: float) -> ReadyRequest:
        self._under_way[item.request_id] = prompt
        return ReadyRequest(
            request_id=item.request_id,
            start_ms=start_ms,
            prompt=prompt,
            output_tokens=item.output_tokens,
            session=item.session,
            turn=item.turn,
        )
