"""A late-binding policy by hand: events go in, what it sends and refuses is kept."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from kvrouting_core.identity import WorkerId
from kvrouting_core.routing.decision import Action, Dispatch, Refusal
from kvrouting_core.routing.events import (
    Arrival,
    Ended,
    Event,
    FirstToken,
    LoadReport,
    Outcome,
    RoutingRequest,
    SchedulerOptions,
    WorkerJoined,
)
from kvrouting_core.routing.late import LatePolicy
from kvrouting_core.routing.parameters import LbgrParameters
from kvrouting_core.routing.policy import AdmissionLimits
from tests.fakes.routing_pool import BLOCK_TOKENS, SetCache, profile

WORKERS = tuple(WorkerId(f"w{i}") for i in range(3))
ALONE = WORKERS[:1]
MS_PER_TOKEN = 0.112  # of the L40's prior


class Bench:
    """A late-binding policy with workers, and what it has sent and refused."""

    def __init__(
        self,
        workers: Sequence[WorkerId] = ALONE,
        *,
        parameters: Mapping[str, object] | None = None,
        limits: AdmissionLimits | None = None,
        scheduler: SchedulerOptions | None = None,
        seed: int = 1,
    ) -> None:
        self.cache = SetCache()
        self.now_ms = 0.0
        self.sent: list[tuple[str, WorkerId]] = []
        self.refused: list[Refusal] = []
        self.policy = LatePolicy(
            "lbgr",
            LbgrParameters(binding="late", exploration_share=0, **(parameters or {})),  # type: ignore[arg-type]
            cache=self.cache,
            block_size_tokens=BLOCK_TOKENS,
            rng=random.Random(seed),
            limits=limits or AdmissionLimits(),
        )
        for worker in workers:
            self.tell(WorkerJoined(profile=profile(worker, scheduler=scheduler)))

    def tell(self, event: Event) -> Sequence[Action]:
        actions = self.policy.handle(event, now_ms=self.now_ms)
        for action in actions:
            if isinstance(action, Dispatch):
                self.sent.append((action.request_id, action.worker))
            else:
                self.refused.append(action)
        return actions

    def arrive(
        self, name: str, tokens: int = 2000, *, blocks: Sequence[int] = (), excluded: Sequence[WorkerId] = ()
    ) -> Sequence[Action]:
        prompt = max(tokens, len(blocks) * BLOCK_TOKENS + 1)
        request = RoutingRequest(request_id=name, blocks=blocks, prompt_tokens=prompt, excluded=frozenset(excluded))
        return self.tell(Arrival(request=request))

    def first_token(self, name: str) -> None:
        self.tell(FirstToken(request_id=name))

    def end(self, name: str, outcome: Outcome = Outcome.COMPLETED) -> None:
        self.tell(Ended(request_id=name, outcome=outcome, output_tokens=4))

    @property
    def order(self) -> list[str]:
        return [name for name, _ in self.sent]


def report(bench: Bench, *, running: int, worker: WorkerId = ALONE[0], waiting_tokens: int = 0) -> None:
    bench.now_ms += 1000
    bench.tell(
        LoadReport(
            worker=worker,
            reported_ms=bench.now_ms,
            running_requests=running,
            waiting_requests=0,
            used_tokens=0,
            waiting_uncached_tokens=waiting_tokens,
            total_prefill_uncached_tokens=0,
            total_prefill_busy_us=0,
        )
    )
