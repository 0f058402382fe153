"""Eviction policies behind one interface, for any radix tree whose owner calls the hooks of
`EvictionPolicy`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from kvrouting_core.eviction.adaptive import GuardedEviction, rlt_adaptive
from kvrouting_core.eviction.base import EvictionPolicy, ExposeParent, NodeRecord, PathAccess, TreeSite
from kvrouting_core.eviction.optimum import Optimum
from kvrouting_core.eviction.rlt import RandomizedLeafTokens
from kvrouting_core.eviction.uniform import UniformLeafTokens
from kvrouting_core.eviction.whole_leaves import LFU, LeafLRU, SegmentedLRU

POLICIES: Mapping[str, Callable[[random.Random], EvictionPolicy[Any]]] = MappingProxyType(
    {
        "rlt": RandomizedLeafTokens,
        "lru": lambda rng: LeafLRU(),  # noqa: ARG005 - every policy is made from a generator
        "lfu": lambda rng: LFU(),  # noqa: ARG005
        "slru": lambda rng: SegmentedLRU(),  # noqa: ARG005
        "random": UniformLeafTokens,
        "rlt-adaptive": rlt_adaptive,
    }
)
"""The policies that need no knowledge of the future, by the name that configuration uses."""

DEFAULT_POLICY = "rlt-adaptive"
"""Of engines, real or simulated, that are told no policy; docs/eviction.md has the reason."""


def make_policy(name: str, rng: random.Random) -> EvictionPolicy[Any]:
    """A new policy for one cache. rng: seeded; policies without chance leave it alone.

    Raises: ValueError for an unknown name.
    """
    if name not in POLICIES:
        raise ValueError(f"unknown eviction policy {name!r}: choose one of {', '.join(POLICIES)}")
    return POLICIES[name](rng)


__all__ = [
    "DEFAULT_POLICY",
    "LFU",
    "POLICIES",
    "EvictionPolicy",
    "ExposeParent",
    "GuardedEviction",
    "LeafLRU",
    "NodeRecord",
    "Optimum",
    "PathAccess",
    "RandomizedLeafTokens",
    "SegmentedLRU",
    "TreeSite",
    "UniformLeafTokens",
    "make_policy",
]
