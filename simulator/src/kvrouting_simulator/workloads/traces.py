"""Workloads from published traces: real arrivals, lengths and shared prefixes, with made up token ids."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from kvrouting_simulator.bounds import at_least, positive
from kvrouting_simulator.workloads import tokens
from kvrouting_simulator.workloads.arrivals import Arrivals, PoissonArrivals
from kvrouting_simulator.workloads.client import ScheduledClient
from kvrouting_simulator.workloads.trace_files import (
    TraceCall,
    read_agent_sessions,
    read_azure,
    read_mooncake,
)
from kvrouting_simulator.workloads.work_item import Client, WorkItem, Workload


@dataclass(frozen=True, kw_only=True, slots=True)
class MooncakeTrace:
    """A trace in Mooncake's format. requests: the first so many; speed: 2 sends them twice as fast as recorded.

    Requests without prompt or answer tokens count with one, since every request has at least one of each.
    The seed has no influence: everything is recorded. All prompts are in memory: 4 bytes a prompt token.
    """

    path: Path
    block_tokens: int = 512
    requests: int | None = None
    speed: float = 1.0
    vocabulary_size: int = tokens.VOCABULARY_SIZE

    def __post_init__(self) -> None:
        _check(self.requests, self.block_tokens, self.vocabulary_size, self.speed)

    def workload(self, *, seed: int) -> Workload:  # noqa: ARG002 - nothing is left to chance
        """The requests of the trace. Raises: TraceError for a bad line; OSError if it cannot be read."""
        calls = read_mooncake(self.path, block_tokens=self.block_tokens, requests=self.requests)
        items = [
            WorkItem(
                request_id=f"trace-{number}",
                arrival_ms=(call.timestamp_ms - calls[0].timestamp_ms) / self.speed,
                tokens=prompt_of(call, f"trace-{number}", self.block_tokens, self.vocabulary_size),
                output_tokens=max(1, call.output_tokens),
                session=f"trace-{number}",
            )
            for number, call in enumerate(calls)
        ]
        return Workload(name=f"mooncake/{self.path.name}", items=items)

    def client(self, *, seed: int) -> Client:
        """Who sends them."""
        return ScheduledClient(self.workload(seed=seed))


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentSessions:
    """Recorded sessions of agents, in 16-token blocks; their clocks are their own, so they start at `arrivals`.

    A call starts at its recorded time in the session (at the latest time recorded so far, where a later turn has an
    earlier one), and not before the call of the turn before it has ended. The order of the sessions' starts follows
    from the seed. Calls without a prompt are left out.
    arrivals: of sessions, not of calls.
    """

    path: Path
    block_tokens: int = 16
    requests: int | None = None
    speed: float = 1.0
    suite: str | None = None
    arrivals: Arrivals = field(default_factory=lambda: PoissonArrivals(rate_per_s=0.1))
    vocabulary_size: int = tokens.VOCABULARY_SIZE

    def __post_init__(self) -> None:
        _check(self.requests, self.block_tokens, self.vocabulary_size, self.speed)

    def workload(self, *, seed: int) -> Workload:
        """The calls of one run. Raises: TraceError for a bad line; ValueError if the file has no call of the suite."""
        sessions = self._sessions()
        names = list(sessions)
        order = np.random.default_rng([seed, 0]).permutation(len(names))
        starts = self.arrivals.times_ms(len(names), np.random.default_rng([seed, 1]))
        items = [
            item
            for position, start_ms in zip(order, starts, strict=True)
            for item in self._items(names[position], sessions[names[position]], float(start_ms))
        ]
        # Python's sort is stable: turns of a session that share a time stay in order.
        items.sort(key=lambda item: item.arrival_ms)
        return Workload(name=f"agents/{self.path.name}", items=items)

    def client(self, *, seed: int) -> Client:
        """Who sends them."""
        return ScheduledClient(self.workload(seed=seed))

    def _sessions(self) -> dict[str, list[TraceCall]]:
        sessions: dict[str, list[TraceCall]] = {}
        for call in read_agent_sessions(self.path, block_tokens=self.block_tokens, requests=self.requests):
            if call.input_tokens and self.suite in (None, call.suite):
                sessions.setdefault(f"{call.suite}-{call.session}", []).append(call)
        if not sessions:
            raise ValueError(
                f"{self.path} has no call with a prompt" + (f" of suite {self.suite!r}" if self.suite else "")
            )
        for calls in sessions.values():
            calls.sort(key=lambda call: call.turn)
        return sessions

    def _items(self, name: str, calls: Iterable[TraceCall], start_ms: float) -> list[WorkItem]:
        items: list[WorkItem] = []
        latest_ms = 0.0
        for call in calls:
            latest_ms = max(latest_ms, call.timestamp_ms / self.speed)
            request_id = f"{name}-{call.turn}"
            items.append(
                WorkItem(
                    request_id=request_id,
                    arrival_ms=start_ms + latest_ms,
                    tokens=prompt_of(call, request_id, self.block_tokens, self.vocabulary_size),
                    output_tokens=max(1, call.output_tokens),
                    session=name,
                    turn=call.turn,
                    depends_on=items[-1].request_id if items else None,
                )
            )
        return items


@dataclass(frozen=True, kw_only=True, slots=True)
class AzureTrace:
    """Arrivals and lengths of one of Azure's public LLM traces. It has no content: no two prompts share a prefix."""

    path: Path
    requests: int | None = None
    speed: float = 1.0
    content_seed: int = 1
    vocabulary_size: int = tokens.VOCABULARY_SIZE

    def __post_init__(self) -> None:
        _check(self.requests, 1, self.vocabulary_size, self.speed)

    def workload(self, *, seed: int) -> Workload:  # noqa: ARG002 - nothing is left to chance
        """The requests of the trace. Raises: TraceError for a bad row."""
        rng = np.random.default_rng([self.content_seed, 2])
        items = [
            WorkItem(
                request_id=f"azure-{number}",
                arrival_ms=row.timestamp_ms / self.speed,
                tokens=tokens.drawn(rng, max(1, row.input_tokens), self.vocabulary_size),
                output_tokens=max(1, row.output_tokens),
                session=f"azure-{number}",
            )
            for number, row in enumerate(read_azure(self.path, requests=self.requests))
        ]
        return Workload(name=f"azure/{self.path.name}", items=items)

    def client(self, *, seed: int) -> Client:
        """Who sends them."""
        return ScheduledClient(self.workload(seed=seed))


def prompt_of(call: TraceCall, request_id: str, block_tokens: int, vocabulary_size: int) -> array[int]:
    """The prompt of a call: the same tokens for the same block id; a tail without an id is its own."""
    covered = min(call.input_tokens, len(call.hash_ids) * block_tokens)
    prompt = tokens.of_blocks(call.hash_ids, block_tokens, covered, vocabulary_size)
    tail = max(1, call.input_tokens) - covered
    if tail:
        rng = np.random.default_rng(list(request_id.encode()))
        prompt += tokens.drawn(rng, tail, vocabulary_size)
    return prompt


def _check(requests: int | None, block_tokens: int, vocabulary_size: int, speed: float) -> None:
    if requests is not None:
        at_least(1, "requests", requests)
    at_least(1, "block_tokens", block_tokens)
    at_least(1, "vocabulary_size", vocabulary_size)
    positive("speed", speed)
