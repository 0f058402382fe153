"""Runs of one policy on one load, and the file of their results, which grows until it is complete."""

from __future__ import annotations

import csv
import random
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kvrouting_core.eviction import EvictionPolicy, GuardedEviction, Optimum, make_policy
from kvrouting_core.radix_cache import RadixCache
from kvrouting_simulator.eviction_study.arc_rule import arc_on_the_tree
from kvrouting_simulator.eviction_study.loads import LOADS, Prompts

OPT = "opt"
ARC = "arc"
CHANCELESS = frozenset({"lru", "slru", "lfu", OPT})
POLICY_TITLES: Mapping[str, str] = MappingProxyType(
    {
        "lru": "L-LRU",
        "rlt": "RLT",
        "slru": "SLRU",
        ARC: "ARC on the tree",
        "rlt-adaptive": "rlt-adaptive",
        OPT: "OPT",
    }
)
SAME_FOR_EVERY_SEED = frozenset({"gsp-round-robin", "mooncake"})
"""Loads in which the seed decides the policy's coins alone."""


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Case:
    """One run: a policy on a load. seed: of the load, where it has one, and of the policy's coins."""

    load: str
    capacity_tokens: int
    page_size: int
    policy: str
    seed: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """hit_rate: cached prompt tokens / prompt tokens. The others are of rlt-adaptive, in pages, else 0: times in
    safe mode, own loads, the ghost's loads, and the highest share that own loads had of what the theorem allows.
    """

    case: Case
    hit_rate: float
    safe_entries: int = 0
    own_loads: int = 0
    ghost_loads: int = 0
    share_of_bound: float = 0.0


def run_case(case: Case, prompts: Prompts) -> Outcome:
    """Serves the prompts one after the other. Raises: AssertionError if the theorem's bound is passed."""
    policy = _policy(case, prompts)
    cache = RadixCache(capacity_tokens=case.capacity_tokens, page_size=case.page_size, policy=policy)
    guarded = policy if isinstance(policy, GuardedEviction) and case.policy != ARC else None
    hits, highest = 0, 0.0
    for prompt in prompts:
        if len(prompt) > case.capacity_tokens:
            continue  # no engine of this size would take it
        hits += cache.serve(prompt)
        if guarded is not None:
            highest = max(highest, _share_of_bound(guarded))
    total = sum(len(prompt) for prompt in prompts if len(prompt) <= case.capacity_tokens)
    if highest > 1:
        raise AssertionError(f"{case}: own loads reached {highest:.3f} of what the theorem allows")
    if guarded is None:
        return Outcome(case=case, hit_rate=hits / total)
    debt = guarded.debt
    return Outcome(
        case=case,
        hit_rate=hits / total,
        safe_entries=debt.safe_entries,
        own_loads=debt.own_loads,
        ghost_loads=debt.ghost_loads,
        share_of_bound=highest,
    )


def cases(loads: Iterable[str], policies: Iterable[str], seeds: Iterable[int], page_size: int) -> list[Case]:
    """All runs that differ: what has no chance in it runs once."""
    found = []
    policies, seeds = list(policies), list(seeds)
    for load in loads:
        for seed in seeds:
            for capacity in LOADS[load].capacities_tokens:
                for policy in policies:
                    if seed != seeds[0] and load in SAME_FOR_EVERY_SEED and policy in CHANCELESS:
                        continue
                    found.append(
                        Case(load=load, capacity_tokens=capacity, page_size=page_size, policy=policy, seed=seed)
                    )
    return found


class OutcomeFile:
    """A CSV file with one line for each run; a run that it has is not run again."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.outcomes: dict[Case, Outcome] = {}
        if path.exists():
            with path.open(encoding="utf-8", newline="") as file:
                for row in csv.DictReader(file):
                    outcome = _outcome(row)
                    self.outcomes[outcome.case] = outcome

    def add(self, outcome: Outcome) -> None:
        """Keeps a result at once, so that an interrupted study goes on where it was."""
        self.outcomes[outcome.case] = outcome
        rows = [self.outcomes[case] for case in sorted(self.outcomes)]
        lines = [asdict(row.case) | {name: getattr(row, name) for name in _FIGURES} for row in rows]
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(lines[0]))
            writer.writeheader()
            writer.writerows(lines)


_FIGURES = [field.name for field in fields(Outcome) if field.name != "case"]


def _outcome(row: Mapping[str, Any]) -> Outcome:
    case = Case(
        load=row["load"],
        capacity_tokens=int(row["capacity_tokens"]),
        page_size=int(row["page_size"]),
        policy=row["policy"],
        seed=int(row["seed"]),
    )
    return Outcome(
        case=case,
        hit_rate=float(row["hit_rate"]),
        safe_entries=int(row["safe_entries"]),
        own_loads=int(row["own_loads"]),
        ghost_loads=int(row["ghost_loads"]),
        share_of_bound=float(row["share_of_bound"]),
    )


def _policy(case: Case, prompts: Prompts) -> EvictionPolicy[Any]:
    rng = random.Random(f"{case.seed} {case.policy}")
    if case.policy == OPT:
        served = [("", prompt) for prompt in prompts if len(prompt) <= case.capacity_tokens]
        return Optimum(served, page_size=case.page_size)
    return arc_on_the_tree(rng) if case.policy == ARC else make_policy(case.policy, rng)


def _share_of_bound(policy: GuardedEviction) -> float:
    debt = policy.debt
    allowed = 1.02 * debt.ghost_loads + 1.25 * policy.capacity_pages + policy.longest_path_pages
    return debt.own_loads / allowed
