"""Multi-turn chat: conversations whose history grows by the user's turns and by the answers."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np

from kvrouting_simulator.bounds import at_least, one_of
from kvrouting_simulator.workloads import tokens
from kvrouting_simulator.workloads.arrivals import Arrivals, PoissonArrivals
from kvrouting_simulator.workloads.client import ScheduledClient
from kvrouting_simulator.workloads.paper_client import PaperClient
from kvrouting_simulator.workloads.work_item import Client, WorkItem, Workload

Loop = Literal["open_loop", "paper"]


@dataclass(frozen=True, kw_only=True, slots=True)
class MultiTurn:
    """Conversation c has turns[c mod len] turns of turn_tokens each.

    loop: `open_loop` plans a random interleaving of all turns at the arrivals' times; a turn starts at its time, or
    when the turn before it has ended if that is later. `paper` keeps `concurrency` requests under way, each for a
    conversation drawn at random among the unfinished ones, also if a turn of it is under way: that turn is then
    asked again. It repeats most of its requests and is there for comparison with the paper's figures only.
    content_seed: of the tokens; the run's seed decides order and arrivals.
    """

    conversations: int = 128
    turns: tuple[int, ...] = (2, 4, 6, 8)
    turn_tokens: int = 1024
    output_tokens: int = 4
    loop: Loop = "open_loop"
    concurrency: int = 128
    arrivals: Arrivals = field(default_factory=PoissonArrivals)
    requests: int | None = None
    content_seed: int = 1
    vocabulary_size: int = tokens.VOCABULARY_SIZE

    def __post_init__(self) -> None:
        for name in ("conversations", "turn_tokens", "output_tokens", "concurrency", "vocabulary_size"):
            at_least(1, name, getattr(self, name))
        if self.requests is not None:
            at_least(1, "requests", self.requests)
        if not self.turns or min(self.turns) < 1:
            raise ValueError(f"turns must be numbers of at least 1, got {self.turns}")
        one_of(get_args(Loop), "loop", self.loop)

    def workload(self, *, seed: int) -> Workload:
        """The planned turns of an open loop. Raises: ValueError for the paper's loop, which plans nothing."""
        if self.loop != "open_loop":
            raise ValueError(f"loop {self.loop!r} draws its requests as it goes: it has no planned workload")
        user_turns = self.user_turns()
        slots = [c for c, own in enumerate(user_turns) for _ in own]
        order = [slots[i] for i in np.random.default_rng([seed, 0]).permutation(len(slots))][: self.requests]
        times = self.arrivals.times_ms(len(order), np.random.default_rng([seed, 1]))
        next_turn = [0] * self.conversations
        items = []
        for conversation, time_ms in zip(order, times, strict=True):
            turn = next_turn[conversation]
            next_turn[conversation] += 1
            items.append(self._item(conversation, turn, user_turns[conversation][turn], float(time_ms)))
        return Workload(name="multi_turn/open_loop", items=items)

    def client(self, *, seed: int) -> Client:
        """Who sends them."""
        if self.loop == "open_loop":
            return ScheduledClient(self.workload(seed=seed))
        return PaperClient(
            self.user_turns(),
            output_tokens=self.output_tokens,
            concurrency=self.concurrency,
            max_requests=self.requests,
            seed=seed,
        )

    def user_turns(self) -> list[list[array[int]]]:
        """What the user says: conversation → turn → tokens."""
        rng = np.random.default_rng([self.content_seed, 2])
        return [
            [
                tokens.drawn(rng, self.turn_tokens, self.vocabulary_size)
                for _ in range(self.turns[conversation % len(self.turns)])
            ]
            for conversation in range(self.conversations)
        ]

    def _item(self, conversation: int, turn: int, said: array[int], time_ms: float) -> WorkItem:
        return WorkItem(
            request_id=f"chat-{conversation}-{turn}",
            arrival_ms=time_ms,
            tokens=said,
            output_tokens=self.output_tokens,
            session=f"chat-{conversation}",
            turn=turn,
            depends_on=f"chat-{conversation}-{turn - 1}" if turn else None,
            continues=turn > 0,
        )
