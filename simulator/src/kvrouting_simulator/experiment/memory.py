"""How many tokens of KV cache a card holds beside a model's weights."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from kvrouting_core.service_time import L40_CAPACITY_TOKENS

USUAL_FRACTION = 0.88
_GIB = 2**30
_KIB = 2**10


@dataclass(frozen=True, kw_only=True, slots=True)
class MemorySetUp:
    """A model on one worker's cards. weights_gib: all of them, in 16 bits; cards_gib: of all its cards."""

    model: str
    cards: str
    weights_gib: float
    cards_gib: float
    kv_kib_per_token: int

    def kv_tokens(self, fraction: float) -> int:
        """(fraction · memory − weights) / KV of a token; negative if the weights alone do not fit."""
        return int((fraction * self.cards_gib - self.weights_gib) * _GIB / (self.kv_kib_per_token * _KIB))


# Parameters · 2 bytes: 8.03e9 and buffers, 46.7e9, 70.6e9. What a card offers, less what its driver keeps.
SET_UPS: Mapping[str, MemorySetUp] = MappingProxyType(
    {
        name: MemorySetUp(model=model, cards=cards, weights_gib=weights, cards_gib=memory, kv_kib_per_token=kv)
        for name, model, cards, weights, memory, kv in (
            ("L40", "Llama-3.1-8B", "1 x L40", 15.1, 44.6, 128),
            ("H200", "Llama-3.1-8B", "1 x H200", 15.0, 140.4, 128),
            ("H200-mixtral-8x7b", "Mixtral-8x7B", "1 x H200", 87.0, 140.4, 128),
            ("H200-llama-70b", "Llama-3.1-70B", "1 x H200", 131.5, 140.4, 320),
            ("H200x2-llama-70b", "Llama-3.1-70B", "2 x H200", 131.5, 280.8, 320),
            ("H200x4-llama-70b", "Llama-3.1-70B", "4 x H200", 131.5, 561.6, 320),
        )
    }
)
_L40_CLASSES = ("L40", "L40-paper", "L40S")


def capacity_at(worker_class: str, fraction: float) -> int:
    """KV tokens at a memory fraction: for the L40 classes from the measured table, linear between its points.

    Raises: ValueError for a fraction outside 0..1 or the table, for a class without one, and if nothing is left.
    """
    if not 0 < fraction < 1:
        raise ValueError(f"memory_fraction must be between 0 and 1, got {fraction}")
    if worker_class in _L40_CLASSES:
        return _interpolated(fraction)
    if worker_class not in SET_UPS:
        raise ValueError(f"memory_fraction is not known for worker class {worker_class!r}: give capacity_tokens")
    tokens = SET_UPS[worker_class].kv_tokens(fraction)
    if tokens <= 0:
        raise ValueError(f"memory_fraction {fraction} of {worker_class} leaves no KV cache: the weights do not fit")
    return tokens


def _interpolated(fraction: float) -> int:
    points = sorted(L40_CAPACITY_TOKENS.items())
    if not points[0][0] <= fraction <= points[-1][0]:
        raise ValueError(f"memory_fraction of an L40 is known from {points[0][0]} to {points[-1][0]}, got {fraction}")
    for (low, few), (high, many) in itertools.pairwise(points):
        if fraction <= high:
            return round(few + (fraction - low) / (high - low) * (many - few))
    return points[-1][1]
