"""One request inside the engine, from its submission to its last token."""

from __future__ import annotations

from array import array

from kvrouting_core.radix_cache import PathLock
from kvrouting_simulator.engine_model.request import EngineRequest


class Sequence:
    """Mutable state of one request.

    path: tokens to be prefilled: the prompt, and after a retraction the answer so far too.
    answer: tokens produced. lock: None while waiting. kv_tokens: tokens whose KV it holds, computed or being computed.
    cached_tokens: prompt tokens cached at its first admission; None before.
    uncached_on_arrival: tokens of the path that were not cached when it came to the queue.
    leaving: its client left during a step; it goes at the end of that step.
    """

    __slots__ = (
        "answer", "cached_tokens", "kv_tokens", "leaving", "lock", "path", "request", "uncached_on_arrival",
    )  # fmt: skip

    def __init__(self, request: EngineRequest) -> None:
        prompt = request.prompt
        self.request = request
        self.path = prompt if isinstance(prompt, array) and prompt.typecode == "I" else array("I", list(prompt))
        self.answer = array("I")
        self.lock: PathLock | None = None
        self.kv_tokens = 0
        self.cached_tokens: int | None = None
        self.uncached_on_arrival = len(self.path)
        self.leaving = False

    @property
    def missing_tokens(self) -> int:
        """Tokens of the path that are still to be prefilled."""
        return len(self.path) - self.kv_tokens

    @property
    def remaining_output_tokens(self) -> int:
        """Tokens that are still to be produced."""
        return self.request.output_tokens - len(self.answer)

    def computed(self) -> array[int]:
        """The tokens whose KV it holds: of prompt and answer; the newest token has no KV yet."""
        if self.kv_tokens <= len(self.path):
            return self.path if self.kv_tokens == len(self.path) else self.path[: self.kv_tokens]
        return (array("I", self.request.prompt) + self.answer)[: self.kv_tokens]

    def rewind(self) -> None:
        """After a retraction: everything, the answer so far too, is to be prefilled again."""
        self.path = array("I", self.request.prompt) + self.answer
        self.kv_tokens = 0
