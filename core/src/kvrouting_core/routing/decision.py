"""A decision is a value: log line, span, metric, header, debug page and test read the same object."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from kvrouting_core.identity import WorkerId


class Candidate(NamedTuple):
    """One worker as the policy judged it for one request; the terms that a policy does not use are 0.

    A named tuple, because each decision makes one for every worker: a frozen dataclass costs six times as much.
    """

    worker: WorkerId
    matched_tokens: int  # leading prompt tokens that the index says it holds
    credited_tokens: int  # the same with what is being prefilled there now; at least matched_tokens
    uncached_tokens: int  # what it would have to prefill, all prompts of the request together
    in_flight: int  # requests dispatched to it by this router
    service_ms: float  # s
    queue_ms: float  # P, before this request
    residual_ms: float  # r
    prediction_ms: float  # E = s + P + r: what is learned from and reported
    price_ms: float  # what the choice adds for those who come later
    cost_ms: float  # what the choice minimises


class Reason(enum.Enum):
    """Why a worker was chosen."""

    LOWEST_COST = "lowest_cost"
    LONGEST_PREFIX = "longest_prefix"
    SMALLEST_CACHE = "smallest_cache"
    LEAST_LOAD = "least_load"
    NEXT_IN_TURN = "next_in_turn"
    RANDOM = "random"
    ONLY_CANDIDATE = "only_candidate"
    EXPLORATION = "exploration"  # a worker with few observations gets its share


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """Where one request goes, and every candidate's terms."""

    request_id: str
    policy: str
    worker: WorkerId
    reason: Reason
    decided_ms: float
    waited_ms: float  # in the router's own queue
    prompt_tokens: int
    candidates: tuple[Candidate, ...]

    def __post_init__(self) -> None:
        if self.worker not in [c.worker for c in self.candidates]:
            raise ValueError(f"chosen worker {self.worker} of {self.request_id} is not among the candidates")

    @property
    def chosen(self) -> Candidate:
        """The candidate that was chosen."""
        return next(c for c in self.candidates if c.worker == self.worker)

    def as_dict(self) -> Mapping[str, object]:
        """Plain values, ready for JSON."""
        return {
            "request_id": self.request_id,
            "policy": self.policy,
            "worker": self.worker,
            "reason": self.reason.value,
            "decided_ms": self.decided_ms,
            "waited_ms": self.waited_ms,
            "prompt_tokens": self.prompt_tokens,
            "candidates": [c._asdict() for c in self.candidates],
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Dispatch:
    """Send the request to the worker now; the reservation is already made."""

    request_id: str
    worker: WorkerId
    decision: Decision


class RefusalReason(enum.Enum):
    """Why a request is not served."""

    NO_WORKER = "no_worker"  # 503
    OVERLOADED = "overloaded"  # 429 with Retry-After


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """The request is not taken; nothing is reserved and no `Ended` follows.

    retry_after_ms: expected time until there is room; 0 with NO_WORKER.
    """

    request_id: str
    reason: RefusalReason
    retry_after_ms: float = 0.0


Action = Dispatch | Refusal
