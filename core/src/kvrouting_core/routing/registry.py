"""The policies by name."""

from __future__ import annotations

import random
from collections.abc import Mapping

from kvrouting_core.routing.admission import Admission
from kvrouting_core.routing.baselines import BlindChooser, CacheAware, InTurn, any_worker, fewest_in_flight
from kvrouting_core.routing.choice import Chooser
from kvrouting_core.routing.decision import Reason
from kvrouting_core.routing.immediate import ImmediatePolicy
from kvrouting_core.routing.late import LatePolicy
from kvrouting_core.routing.lbgr import Lbgr
from kvrouting_core.routing.lbgr_paper import PaperLbgr
from kvrouting_core.routing.parameters import (
    CacheAwareParameters,
    LbgrParameters,
    NoParameters,
    PaperParameters,
    parse_parameters,
)
from kvrouting_core.routing.policy import AdmissionLimits, CacheView, Policy
from kvrouting_core.routing.released import RELEASED_POLICY_NAMES, build_released

POLICY_NAMES: tuple[str, ...] = ("lbgr", "lbgr-paper", "cache_aware", "least_load", "round_robin", "random")


def build_policy(
    name: str,
    parameters: Mapping[str, object],
    *,
    cache: CacheView,
    block_size_tokens: int,
    rng: random.Random,
    limits: AdmissionLimits,
) -> Policy:
    """Builds a policy without workers.

    parameters: plain values by name; see the policy's class in `parameters`. block_size_tokens: of a routing block.
    Raises: ValueError for an unknown policy, parameter or value, naming what is known.
    """
    if name not in (*POLICY_NAMES, *RELEASED_POLICY_NAMES):
        raise ValueError(f"unknown policy {name!r}; known: {', '.join(POLICY_NAMES)}")
    if block_size_tokens < 1:
        raise ValueError(f"block_size_tokens is {block_size_tokens}; give the size of a routing block, 16 to 128")
    if name in RELEASED_POLICY_NAMES:
        return build_released(name, parameters, block_size_tokens=block_size_tokens, rng=rng, limits=limits)
    if name == "lbgr":
        chosen = parse_parameters(LbgrParameters, name, parameters)
        return _lbgr(chosen, cache=cache, block_size_tokens=block_size_tokens, rng=rng, limits=limits)
    admission = Admission(limits)
    if name == "lbgr-paper":
        paper = PaperLbgr(
            parse_parameters(PaperParameters, name, parameters),
            cache=cache,
            block_size_tokens=block_size_tokens,
            rng=rng,
            admission=admission,
        )
        return ImmediatePolicy(name, paper, admission=admission, observer=paper)
    chooser = _unlearned(name, parameters, cache, block_size_tokens, rng, admission)
    return ImmediatePolicy(name, chooser, admission=admission)


def _lbgr(
    parameters: LbgrParameters, *, cache: CacheView, block_size_tokens: int, rng: random.Random, limits: AdmissionLimits
) -> Policy:
    if parameters.binding == "late":
        return LatePolicy("lbgr", parameters, cache=cache, block_size_tokens=block_size_tokens, rng=rng, limits=limits)
    admission = Admission(limits)
    lbgr = Lbgr(parameters, cache=cache, block_size_tokens=block_size_tokens, rng=rng, admission=admission)
    return ImmediatePolicy("lbgr", lbgr, admission=admission, observer=lbgr, report_reader=lbgr)


def _unlearned(
    name: str,
    parameters: Mapping[str, object],
    cache: CacheView,
    block_size_tokens: int,
    rng: random.Random,
    admission: Admission,
) -> Chooser:
    if name == "cache_aware":
        return CacheAware(
            parse_parameters(CacheAwareParameters, name, parameters),
            cache=cache,
            block_size_tokens=block_size_tokens,
            rng=rng,
            admission=admission,
        )
    parse_parameters(NoParameters, name, parameters)
    if name == "least_load":
        return BlindChooser(fewest_in_flight(rng), Reason.LEAST_LOAD, admission=admission)
    if name == "round_robin":
        return BlindChooser(InTurn(), Reason.NEXT_IN_TURN, admission=admission)
    return BlindChooser(any_worker(rng), Reason.RANDOM, admission=admission)
