"""How long an engine's steps take: the time model of a worker class, shared by estimator and simulator.

Prefill batch of items with p cached and n new tokens: `T = c0 + max(w, a·Σn) + b·Σ n·(p + n/2)`.
Decode step of B requests with C tokens of context in total: `T = d0(B) + d1·C + d2·B`.
The coefficients of the known classes are fitted to public measurements of SGLang's operations on these cards.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTimes:
    """Coefficients of one engine on one worker class, in ms and tokens.

    Raises: ValueError if a coefficient is negative or `prefill_ms_per_token` is not positive.
    """

    prefill_overhead_ms: float  # c0
    prefill_floor_ms: float  # w: reading the weights takes this long however few tokens there are
    prefill_ms_per_token: float  # a
    attention_ms_per_token_pair: float  # b
    decode_overhead_ms: float  # d0 at a batch of eight and more
    decode_overhead_alone_ms: float  # d0 at a batch of one: differs for mixtures of experts
    decode_ms_per_context_token: float  # d1
    decode_ms_per_request: float  # d2

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value < 0:
                raise ValueError(f"{field.name} must not be negative, got {value}")
        if not self.prefill_ms_per_token > 0:
            raise ValueError(f"prefill_ms_per_token must be positive, got {self.prefill_ms_per_token}")

    def prefill_ms(self, items: Iterable[tuple[int, int]]) -> float:
        """Duration of one prefill batch. items: (cached, new) tokens of each request; 0.0 if there is none."""
        new_tokens = 0
        token_pairs = 0.0
        for cached, new in items:
            new_tokens += new
            token_pairs += new * (cached + new / 2)
        if not new_tokens:
            return 0.0
        return (
            self.prefill_overhead_ms
            + max(self.prefill_floor_ms, self.prefill_ms_per_token * new_tokens)
            + self.attention_ms_per_token_pair * token_pairs
        )

    def decode_ms(self, requests: float, context_tokens: float) -> float:
        """Duration of one decode step of `requests` with `context_tokens` in total; 0.0 without requests."""
        if not requests:
            return 0.0
        # Experts touched grow with the batch: linear from one request to eight, flat after.
        share = min(requests - 1, 7) / 7
        overhead = self.decode_overhead_alone_ms + share * (self.decode_overhead_ms - self.decode_overhead_alone_ms)
        return overhead + self.decode_ms_per_context_token * context_tokens + self.decode_ms_per_request * requests

    def prefill_work_ms(self, cached_tokens: float, new_tokens: float) -> float:
        """Marginal prefill work of one request, `a·u + b·u·(h + u/2)`: what it adds to a full batch."""
        return new_tokens * (
            self.prefill_ms_per_token + self.attention_ms_per_token_pair * (cached_tokens + new_tokens / 2)
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerClass:
    """A model on a card: its step times and the KV cache that fits at the usual memory fraction."""

    name: str
    times: StepTimes
    capacity_tokens: int  # at memory fraction .88
    confidence: str

    def __post_init__(self) -> None:
        if self.capacity_tokens <= 0:
            raise ValueError(f"capacity_tokens of {self.name} must be positive, got {self.capacity_tokens}")


def _worker_class(
    name: str,
    prefill: tuple[float, float, float, float],
    decode: tuple[float, float, float, float],
    capacity_tokens: int,
    confidence: str,
) -> WorkerClass:
    c0, w, a, b = prefill
    d0, d0_alone, d1, d2 = decode
    times = StepTimes(
        prefill_overhead_ms=c0,
        prefill_floor_ms=w,
        prefill_ms_per_token=a,
        attention_ms_per_token_pair=b,
        decode_overhead_ms=d0,
        decode_overhead_alone_ms=d0_alone,
        decode_ms_per_context_token=d1,
        decode_ms_per_request=d2,
    )
    return WorkerClass(name=name, times=times, capacity_tokens=capacity_tokens, confidence=confidence)


# Llama-3.1-8B unless the name says otherwise; KV of 128 KiB a token (8B, Mixtral), 320 KiB (70B).
WORKER_CLASSES: Mapping[str, WorkerClass] = MappingProxyType(
    {
        c.name: c
        for c in (
            _worker_class("L40", (6, 19, 0.112, 4.4e-6), (21, 21, 1.9e-4, 0.05), 197_000, "±15 %"),
            # The L40 with the slope that the paper's table 2 implies: 16 % slower than the nominal card.
            _worker_class("L40-paper", (6, 19, 0.130, 5.1e-6), (21, 21, 1.9e-4, 0.05), 197_000, "fitted to one table"),
            _worker_class("L40S", (6, 19, 0.074, 2.8e-6), (22, 22, 1.9e-4, 0.05), 197_000, "±8 %"),
            _worker_class("H200", (5, 4.5, 0.0225, 9.5e-7), (6, 6, 3.1e-5, 0.02), 911_000, "±12 %"),
            _worker_class("H200-mixtral-8x7b", (6, 22, 0.050, 9.5e-7), (24, 8, 3.1e-5, 0.03), 321_000, "±20 %"),
            _worker_class("H200x2-llama-70b", (8, 18, 0.118, 2.3e-6), (21, 21, 3.9e-5, 0.05), 395_000, "±15 %"),
            _worker_class("H200x4-llama-70b", (8, 10, 0.078, 1.2e-6), (13, 13, 2.0e-5, 0.05), 1_200_000, "±20 %"),
        )
    }
)

# KV tokens of the L40 classes by SGLang's memory fraction.
L40_CAPACITY_TOKENS: Mapping[float, int] = MappingProxyType(
    {0.5: 58_000, 0.6: 95_000, 0.7: 131_000, 0.8: 168_000, 0.88: 197_000, 0.9: 204_000}
)


def worker_class(name: str) -> WorkerClass:
    """Looks a class up. Raises: ValueError naming the unknown class and the known ones."""
    try:
        return WORKER_CLASSES[name]
    except KeyError:
        known = ", ".join(WORKER_CLASSES)
        raise ValueError(f"unknown worker class {name!r}; known: {known}") from None
