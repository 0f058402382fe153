"""A pool around a routing policy: a cache whose contents a test sets, and short words for the events."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from kvrouting_core.identity import WorkerId
from kvrouting_core.routing.decision import Action, Decision, Dispatch, Refusal
from kvrouting_core.routing.events import (
    Arrival,
    Ended,
    FirstToken,
    LoadReport,
    Outcome,
    PrefixArrived,
    RoutingRequest,
    SchedulerOptions,
    WorkerGone,
    WorkerJoined,
    WorkerPaused,
    WorkerProfile,
)
from kvrouting_core.routing.policy import AdmissionLimits, Policy, WorkerBelief
from kvrouting_core.routing.registry import build_policy

BLOCK_TOKENS = 64


class SetCache:
    """A `CacheView` by definition: a set of blocks per worker."""

    def __init__(self) -> None:
        self.held: dict[WorkerId, set[int]] = {}

    def put(self, worker: str, blocks: Sequence[int]) -> None:
        self.held.setdefault(WorkerId(worker), set()).update(blocks)

    def match(self, blocks: Sequence[int]) -> Mapping[WorkerId, int]:
        depths = {worker: self._depth(held, blocks) for worker, held in self.held.items()}
        return {worker: depth for worker, depth in depths.items() if depth}

    def count(self, worker: WorkerId) -> int:
        return len(self.held.get(worker, ()))

    @staticmethod
    def _depth(held: set[int], blocks: Sequence[int]) -> int:
        for depth, block in enumerate(blocks):
            if block not in held:
                return depth
        return len(blocks)


def prompt_blocks(prompt: int, count: int, *, prefix: Sequence[int] = ()) -> list[int]:
    """Block hashes of a prompt that begins with `prefix` and goes on in its own way: unequal for unequal prompts."""
    return [*prefix, *(prompt * 1_000_000 + position for position in range(len(prefix), count))]


def profile(worker: str, worker_class: str = "L40", scheduler: SchedulerOptions | None = None) -> WorkerProfile:
    return WorkerProfile(
        worker=WorkerId(worker),
        worker_class=worker_class,
        capacity_tokens=197_000,
        scheduler=scheduler or SchedulerOptions(),
    )


class RoutingPool:
    """One policy that answers each arrival at once, its cache and its clock. `lbgr` is taken in its immediate form."""

    def __init__(
        self,
        policy: str,
        *workers: str,
        parameters: Mapping[str, object] | None = None,
        limits: AdmissionLimits | None = None,
        seed: int = 1,
        worker_class: str = "L40",
    ) -> None:
        self.cache = SetCache()
        self.now_ms = 0.0
        self.policy: Policy = build_policy(
            policy,
            {**({"binding": "immediate"} if policy == "lbgr" else {}), **(parameters or {})},
            cache=self.cache,
            block_size_tokens=BLOCK_TOKENS,
            rng=random.Random(seed),
            limits=limits or AdmissionLimits(),
        )
        for worker in workers:
            self.join(worker, worker_class=worker_class)

    # Workers

    def join(
        self,
        worker: str,
        *,
        restarted: bool = False,
        worker_class: str = "L40",
        scheduler: SchedulerOptions | None = None,
    ) -> None:
        joined = WorkerJoined(profile=profile(worker, worker_class, scheduler), restarted=restarted)
        assert not self.policy.handle(joined, now_ms=self.now_ms)

    def pause(self, worker: str) -> None:
        self.policy.handle(WorkerPaused(worker=WorkerId(worker), reason="test"), now_ms=self.now_ms)

    def leave(self, worker: str) -> None:
        self.policy.handle(WorkerGone(worker=WorkerId(worker), reason="test"), now_ms=self.now_ms)

    def report(
        self,
        worker: str,
        *,
        busy_ms: float = 0.0,
        tokens: int = 0,
        running: int = 0,
        waiting: int = 0,
        waiting_tokens: int = 0,
        reported_ms: float | None = None,
    ) -> None:
        """busy_ms, tokens: the cumulative totals."""
        report = LoadReport(
            worker=WorkerId(worker),
            reported_ms=self.now_ms if reported_ms is None else reported_ms,
            running_requests=running,
            waiting_requests=waiting,
            used_tokens=0,
            waiting_uncached_tokens=waiting_tokens,
            total_prefill_uncached_tokens=tokens,
            total_prefill_busy_us=round(busy_ms * 1000),
        )
        assert not self.policy.handle(report, now_ms=self.now_ms)

    # Requests

    def arrive(
        self,
        request_id: str,
        *,
        blocks: Sequence[int] = (),
        tokens: int | None = None,
        further_tokens: int = 0,
        sequences: int = 1,
        max_output_tokens: int | None = None,
        excluded: Sequence[str] = (),
    ) -> Action:
        request = RoutingRequest(
            request_id=request_id,
            blocks=blocks,
            prompt_tokens=len(blocks) * BLOCK_TOKENS + 1 if tokens is None else tokens,
            further_prompt_tokens=further_tokens,
            sequences=sequences,
            max_output_tokens=max_output_tokens,
            excluded=frozenset(map(WorkerId, excluded)),
        )
        (action,) = self.policy.handle(Arrival(request=request), now_ms=self.now_ms)
        return action

    def decide(self, request_id: str, **request: object) -> Decision:
        """Arrives and expects a dispatch."""
        action = self.arrive(request_id, **request)  # type: ignore[arg-type]
        assert isinstance(action, Dispatch)
        return action.decision

    def refuse(self, request_id: str, **request: object) -> Refusal:
        """Arrives and expects a refusal."""
        action = self.arrive(request_id, **request)  # type: ignore[arg-type]
        assert isinstance(action, Refusal)
        return action

    def first_token(self, request_id: str) -> None:
        self.policy.handle(FirstToken(request_id=request_id), now_ms=self.now_ms)

    def prefix_arrived(self, request_id: str) -> None:
        self.policy.handle(PrefixArrived(request_id=request_id), now_ms=self.now_ms)

    def end(self, request_id: str, outcome: Outcome = Outcome.COMPLETED, *, output_tokens: int | None = None) -> None:
        ended = Ended(request_id=request_id, outcome=outcome, output_tokens=output_tokens)
        self.policy.handle(ended, now_ms=self.now_ms)

    def belief(self, worker: str) -> WorkerBelief:
        return next(b for b in self.policy.beliefs(now_ms=self.now_ms) if b.worker == worker)
