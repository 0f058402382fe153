"""Requests to send, the order in which they depend on one another, and who sends them.

A workload is data: the same items for every policy that is compared. A client turns it into requests: it knows which
may start, and builds the prompt of a turn from the answers before it. The virtual experiment and the load generator
drive the same clients, one by simulated ends, the other by real ones.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvrouting_simulator.bounds import at_least


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkItem:
    """One request of a workload.

    arrival_ms: planned start since the start of the run; an item that depends on another starts at
        max(arrival_ms, end of that one + think_ms).
    tokens: the whole prompt; or, with `continues`, what is appended to prompt and answer of the item it depends on.
    session: conversation, document or group. turn: position in it, from 0.
    """

    request_id: str
    arrival_ms: float
    tokens: array[int]
    output_tokens: int
    session: str
    turn: int = 0
    depends_on: str | None = None
    continues: bool = False
    think_ms: float = 0.0

    def __post_init__(self) -> None:
        at_least(0, f"arrival_ms of {self.request_id}", self.arrival_ms)
        if not self.tokens:
            raise ValueError(f"tokens of {self.request_id} are empty")
        if self.output_tokens < 1:
            raise ValueError(f"output_tokens of {self.request_id} must be at least 1, got {self.output_tokens}")
        if self.turn < 0:
            raise ValueError(f"turn of {self.request_id} must not be negative, got {self.turn}")
        at_least(0, f"think_ms of {self.request_id}", self.think_ms)
        if self.continues and self.depends_on is None:
            raise ValueError(f"{self.request_id} continues a conversation but depends on no request")


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Items in order of planned arrival.

    Raises: ValueError if an id repeats, arrivals go backwards, or an item depends on none before it.
    """

    name: str
    items: Sequence[WorkItem]

    def __post_init__(self) -> None:
        seen: set[str] = set()
        last_ms = 0.0
        for item in self.items:
            if item.request_id in seen:
                raise ValueError(f"request id {item.request_id} occurs twice in workload {self.name}")
            if item.arrival_ms < last_ms:
                raise ValueError(
                    f"{item.request_id} arrives at {item.arrival_ms} ms, before its predecessor's {last_ms} ms"
                )
            if item.depends_on is not None and item.depends_on not in seen:
                raise ValueError(f"{item.request_id} depends on {item.depends_on}, which is not before it")
            seen.add(item.request_id)
            last_ms = item.arrival_ms

    def __len__(self) -> int:
        return len(self.items)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadyRequest:
    """A request with its whole prompt, to be sent at start_ms (since the start of the run)."""

    request_id: str
    start_ms: float
    prompt: array[int]
    output_tokens: int
    session: str
    turn: int


class Client(Protocol):
    """Decides what is sent when; a state machine without a clock."""

    def begin(self) -> Sequence[ReadyRequest]:
        """What can be sent without waiting for any answer, in order of start_ms. Called once."""

    def ended(self, request_id: str, answer: Sequence[int], *, now_ms: float) -> Sequence[ReadyRequest]:
        """What the end of a request allows to be sent, each at its start_ms >= now_ms.

        answer: the tokens of the answer; what there is of it if the request failed.
        Raises: ValueError for a request that is not under way.
        """
