"""Requests from which step times can be told: many lengths, with and without cached prefix, alone and in crowds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvrouting_simulator.bounds import at_least, positive
from kvrouting_simulator.workloads import tokens
from kvrouting_simulator.workloads.client import ScheduledClient
from kvrouting_simulator.workloads.work_item import Client, WorkItem, Workload

_FAMILIES = 6
_ALONE_SHARE = 0.4


@dataclass(frozen=True, kw_only=True, slots=True)
class CalibrationLoad:
    """The first part of the requests comes one at a time, `alone_gap_ms` apart; the rest in crowds of up to `crowd`
    at once, `crowd_gap_ms` apart. Lengths of prompts and answers are spread evenly over their logarithm, and half of
    the prompts continue an earlier one by at least half of their length.
    """

    requests: int = 300
    prompt_tokens: tuple[int, int] = (64, 8192)
    output_tokens: tuple[int, int] = (4, 128)
    alone_gap_ms: float = 2000.0
    crowd: int = 16
    crowd_gap_ms: float = 8000.0
    vocabulary_size: int = tokens.VOCABULARY_SIZE

    def __post_init__(self) -> None:
        at_least(1, "requests", self.requests)
        at_least(1, "crowd", self.crowd)
        for name in ("alone_gap_ms", "crowd_gap_ms"):
            positive(name, getattr(self, name))
        for name in ("prompt_tokens", "output_tokens"):
            least, most = getattr(self, name)
            if not 2 <= least <= most:
                raise ValueError(f"{name} must be a least of 2 or more and a most, got {least} and {most}")

    def client(self, *, seed: int) -> Client:
        """Who sends them."""
        return ScheduledClient(self.workload(seed=seed))

    def workload(self, *, seed: int) -> Workload:
        """The requests of one run."""
        rng = np.random.default_rng([seed, 7])
        prefixes = [tokens.drawn(rng, self.prompt_tokens[1], self.vocabulary_size) for _ in range(_FAMILIES)]
        items = []
        for number, arrival_ms in enumerate(self._arrivals(rng)):
            length = _spread(rng, *self.prompt_tokens)
            shared = int(rng.uniform(0.5, 0.98) * length) if rng.random() < 0.5 else 0
            prompt = prefixes[int(rng.integers(_FAMILIES))][:shared]
            items.append(
                WorkItem(
                    request_id=f"calibration-{number}",
                    arrival_ms=arrival_ms,
                    tokens=prompt + tokens.drawn(rng, length - shared, self.vocabulary_size),
                    output_tokens=_spread(rng, *self.output_tokens),
                    session=f"calibration-{number}",
                )
            )
        return Workload(name="calibration", items=items)

    def _arrivals(self, rng: np.random.Generator) -> list[float]:
        alone = round(_ALONE_SHARE * self.requests)
        times = [number * self.alone_gap_ms for number in range(alone)]
        begin_ms = alone * self.alone_gap_ms
        while len(times) < self.requests:
            size = min(int(rng.integers(1, self.crowd + 1)), self.requests - len(times))
            times += [begin_ms] * size
            begin_ms += self.crowd_gap_ms
        return times


def _spread(rng: np.random.Generator, least: int, most: int) -> int:
    return round(float(np.exp(rng.uniform(np.log(least), np.log(most)))))
