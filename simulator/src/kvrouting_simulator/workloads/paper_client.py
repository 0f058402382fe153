"""The closed loop with which the paper's chat figures were measured: it asks turns again that are under way."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence

from kvrouting_simulator.workloads.work_item import ReadyRequest


class PaperClient:
    """Keeps `concurrency` requests under way, drawing conversations without excluding those being served.

    A conversation moves on when its present turn ends for the first time; the history takes that answer. Later ends
    of the same turn change nothing. The client stops when every conversation is through, or after max_requests.
    """

    def __init__(
        self,
        user_turns: Sequence[Sequence[array[int]]],
        *,
        output_tokens: int,
        concurrency: int,
        max_requests: int | None,
        seed: int,
    ) -> None:
        self._user_turns = user_turns
        self._output_tokens = output_tokens
        self._concurrency = concurrency
        self._max_requests = max_requests
        self._rng = random.Random(seed)
        self._open = list(range(len(user_turns)))
        self._prompts = [turns[0] for turns in user_turns]
        self._turn = [0] * len(user_turns)
        self._under_way: dict[str, tuple[int, int]] = {}
        self._sent = 0

    def begin(self) -> Sequence[ReadyRequest]:
        """The first `concurrency` requests, all at once."""
        drawn = (self._draw(0.0) for _ in range(self._concurrency))
        return [ready for ready in drawn if ready is not None]

    def ended(self, request_id: str, answer: Sequence[int], *, now_ms: float) -> Sequence[ReadyRequest]:
        """One more request for the one that ended. Raises: ValueError if it is not under way."""
        if request_id not in self._under_way:
            raise ValueError(f"request {request_id} is not under way")
        conversation, turn = self._under_way.pop(request_id)
        if turn == self._turn[conversation]:
            self._move_on(conversation, answer)
        following = self._draw(now_ms)
        return [] if following is None else [following]

    def _move_on(self, conversation: int, answer: Sequence[int]) -> None:
        self._turn[conversation] += 1
        turns = self._user_turns[conversation]
        if self._turn[conversation] == len(turns):
            self._open.remove(conversation)
            return
        said = turns[self._turn[conversation]]
        self._prompts[conversation] = self._prompts[conversation] + array("I", answer) + said

    def _draw(self, now_ms: float) -> ReadyRequest | None:
        if not self._open or self._sent == self._max_requests:
            return None
        conversation = self._open[self._rng.randrange(len(self._open))]
        turn = self._turn[conversation]
        request_id = f"chat-{conversation}-{turn}-{self._sent}"
        self._sent += 1
        self._under_way[request_id] = (conversation, turn)
        return ReadyRequest(
            request_id=request_id,
            start_ms=now_ms,
            prompt=self._prompts[conversation],
            output_tokens=self._output_tokens,
            session=f"chat-{conversation}",
            turn=turn,
        )
