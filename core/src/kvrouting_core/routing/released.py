"""The policies of published code that experiments compare with, by name. No router offers them."""

from __future__ import annotations

import random
from collections.abc import Mapping

from kvrouting_core.routing.admission import Admission
from kvrouting_core.routing.cache_aware_released import ReleasedCacheAware
from kvrouting_core.routing.immediate import ImmediatePolicy
from kvrouting_core.routing.lbgr_released import ReleasedLbgr
from kvrouting_core.routing.parameters import CacheAwareParameters, NoParameters, parse_parameters
from kvrouting_core.routing.policy import AdmissionLimits, Policy

RELEASED_POLICY_NAMES: tuple[str, ...] = ("lbgr-released", "cache_aware-released")


def build_released(
    name: str,
    parameters: Mapping[str, object],
    *,
    block_size_tokens: int,
    rng: random.Random,
    limits: AdmissionLimits,
) -> Policy:
    """Builds one of `RELEASED_POLICY_NAMES`; they need no index. Raises: ValueError for another name or parameter."""
    admission = Admission(limits)
    if name == "lbgr-released":
        parse_parameters(NoParameters, name, parameters)
        lbgr = ReleasedLbgr(block_size_tokens=block_size_tokens, admission=admission)
        return ImmediatePolicy(name, lbgr, admission=admission, observer=lbgr)
    if name == "cache_aware-released":
        aware = ReleasedCacheAware(
            parse_parameters(CacheAwareParameters, name, parameters),
            block_size_tokens=block_size_tokens,
            rng=rng,
            admission=admission,
        )
        return ImmediatePolicy(name, aware, admission=admission, observer=aware)
    raise ValueError(f"unknown released policy {name!r}; known: {', '.join(RELEASED_POLICY_NAMES)}")
