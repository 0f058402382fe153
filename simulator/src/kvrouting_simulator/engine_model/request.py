"""What goes into an engine model and what comes out of it."""

from __future__ import annotations

import enum
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal

from kvrouting_core.blocks import Namespace

BASE_NAMESPACE = Namespace(model="")


class RequestTooLong(ValueError):  # noqa: N818 - says what the request is
    """Prompt and answer do not fit the engine's KV cache, however empty it is."""

    def __init__(self, request_id: str, *, needed_tokens: int, capacity_tokens: int) -> None:
        super().__init__(
            f"request {request_id} needs {needed_tokens} tokens for prompt and answer, "
            f"more than the KV cache of {capacity_tokens} tokens"
        )
        self.needed_tokens = needed_tokens
        self.capacity_tokens = capacity_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineRequest:
    """One prompt and the number of tokens that its answer will have.

    prompt: token ids, at least one; array('I') is fast. output_tokens: at least 1, known to the model in advance.
    """

    request_id: str
    prompt: Sequence[int]
    output_tokens: int
    namespace: Hashable = BASE_NAMESPACE

    def __post_init__(self) -> None:
        if not len(self.prompt):
            raise ValueError(f"prompt of {self.request_id} is empty")
        if self.output_tokens < 1:
            raise ValueError(f"output_tokens of {self.request_id} must be at least 1, got {self.output_tokens}")


class StepKind(enum.Enum):
    """What one step of the engine computes."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"  # a prefill chunk with one token for each running request


FinishReason = Literal["length"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenProduced:
    """One token of an answer, at the end of the step that computed it.

    index: 0 for the first. cached_tokens: prompt tokens that were not computed for the first token.
    finish_reason: None unless `finished`.
    """

    request_id: str
    token: int
    index: int
    finished: bool
    finish_reason: FinishReason | None
    cached_tokens: int
    prompt_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineLoad:
    """What an engine reports of itself, as SGLang's LoadStat.

    used_tokens: slots that are neither free nor evictable. waiting_uncached_tokens: prompt tokens of the waiting
    requests beyond what was cached when each arrived, with the rest of a chunked prompt. The totals count from the
    start of the process.
    """

    running_requests: int
    waiting_requests: int
    used_tokens: int
    max_total_tokens: int
    max_running_requests: int
    waiting_uncached_tokens: int
    total_prefill_uncached_tokens: int
    total_prefill_busy_us: int
    total_busy_us: int
    total_prompt_tokens: int
    total_cached_tokens: int
    total_output_tokens: int
    total_retractions: int
