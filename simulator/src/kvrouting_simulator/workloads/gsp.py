"""GSP, generated shared prefix: groups of prompts that share their first part."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal, NamedTuple, get_args

import numpy as np

from kvrouting_simulator.bounds import at_least, one_of
from kvrouting_simulator.workloads import tokens
from kvrouting_simulator.workloads.arrivals import Arrivals, PoissonArrivals
from kvrouting_simulator.workloads.client import ScheduledClient
from kvrouting_simulator.workloads.work_item import Client, WorkItem, Workload

Order = Literal["random", "round_robin", "grouped"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Gsp:
    """Group g has prompts of lengths_tokens[g mod len] tokens; their first prefix_ratio is the same.

    order: `random` shuffles all prompts; `round_robin` takes prompt i of every group, then i + 1: the order that is
    worst for LRU; `grouped` takes one group after the other.
    requests: only the first so many of the order; None: all.
    content_seed: of the tokens, the same for every run; the run's seed decides order and arrivals.
    """

    groups: int = 128
    prompts_per_group: int = 32
    lengths_tokens: tuple[int, ...] = (512, 1024, 2048, 4096, 8192)
    prefix_ratio: float = 0.5
    output_tokens: int = 4
    order: Order = "random"
    arrivals: Arrivals = field(default_factory=PoissonArrivals)
    requests: int | None = None
    content_seed: int = 1
    vocabulary_size: int = tokens.VOCABULARY_SIZE

    def __post_init__(self) -> None:
        for name in ("groups", "prompts_per_group", "output_tokens", "vocabulary_size"):
            at_least(1, name, getattr(self, name))
        if self.requests is not None:
            at_least(1, "requests", self.requests)
        if not self.lengths_tokens or min(self.lengths_tokens) < 2:
            raise ValueError(f"lengths_tokens must be lengths of at least 2 tokens, got {self.lengths_tokens}")
        if not 0 <= self.prefix_ratio < 1:
            raise ValueError(f"prefix_ratio must be in [0, 1), got {self.prefix_ratio}")
        one_of(get_args(Order), "order", self.order)

    def workload(self, *, seed: int) -> Workload:
        """The requests of one run."""
        picks = self._picks(np.random.default_rng([seed, 0]))[: self.requests]
        times = self.arrivals.times_ms(len(picks), np.random.default_rng([seed, 1]))
        prompts = _prompts(self._shape)
        items = [
            WorkItem(
                request_id=f"gsp-{group}-{prompt}",
                arrival_ms=float(time_ms),
                tokens=prompts[group][prompt],
                output_tokens=self.output_tokens,
                session=f"group-{group}",
            )
            for (group, prompt), time_ms in zip(picks, times, strict=True)
        ]
        return Workload(name=f"gsp/{self.order}", items=items)

    def client(self, *, seed: int) -> Client:
        """Who sends them."""
        return ScheduledClient(self.workload(seed=seed))

    def _picks(self, rng: np.random.Generator) -> list[tuple[int, int]]:
        groups, prompts = range(self.groups), range(self.prompts_per_group)
        if self.order == "round_robin":
            return [(group, prompt) for prompt in prompts for group in groups]
        picks = [(group, prompt) for group in groups for prompt in prompts]
        if self.order == "random":
            return [picks[i] for i in rng.permutation(len(picks))]
        return picks

    @property
    def _shape(self) -> _Shape:
        return _Shape(
            self.groups,
            self.prompts_per_group,
            self.lengths_tokens,
            self.prefix_ratio,
            self.content_seed,
            self.vocabulary_size,
        )


class _Shape(NamedTuple):
    groups: int
    prompts_per_group: int
    lengths_tokens: tuple[int, ...]
    prefix_ratio: float
    content_seed: int
    vocabulary_size: int


# Runs that differ in policy, seed or rate have the same prompts: fifty megabytes, drawn once.
@lru_cache(maxsize=1)
def _prompts(shape: _Shape) -> list[list[array[int]]]:
    rng = np.random.default_rng([shape.content_seed, 2])
    prompts = []
    for group in range(shape.groups):
        total = shape.lengths_tokens[group % len(shape.lengths_tokens)]
        shared = tokens.drawn(rng, max(1, round(shape.prefix_ratio * total)), shape.vocabulary_size)
        own = [tokens.drawn(rng, total - len(shared), shape.vocabulary_size) for _ in range(shape.prompts_per_group)]
        prompts.append([shared + tail for tail in own])
    return prompts
