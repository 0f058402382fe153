"""rlt-adaptive: eviction that learns, inside RLT's guarantee; described and proved in docs/eviction.md."""

from __future__ import annotations

import random

from kvrouting_core.eviction.adaptive.block_records import BlockRecord
from kvrouting_core.eviction.adaptive.debt import Debt
from kvrouting_core.eviction.adaptive.guarded_eviction import GuaranteeParameters, GuardedEviction
from kvrouting_core.eviction.adaptive.leaf_pool import LeafPool
from kvrouting_core.eviction.adaptive.learned_rule import LearnedRule
from kvrouting_core.eviction.adaptive.victim_rule import VictimRule, Visit


def rlt_adaptive(rng: random.Random) -> GuardedEviction:
    """The learned rule in its frame. The ghost's coins are seeded by the first one drawn, and then apart."""
    ghost_rng = random.Random(rng.getrandbits(64))
    return GuardedEviction(LearnedRule(rng), ghost_rng)


__all__ = [
    "BlockRecord",
    "Debt",
    "GuaranteeParameters",
    "GuardedEviction",
    "LeafPool",
    "LearnedRule",
    "VictimRule",
    "Visit",
    "rlt_adaptive",
]
