"""The policies to compare with: SGLang's cache-aware rule, least load, round robin, random."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from kvrouting_core.routing.admission import Admission, Overload
from kvrouting_core.routing.choice import Choice, least, reason_for
from kvrouting_core.routing.decision import Candidate, Reason
from kvrouting_core.routing.events import RoutingRequest
from kvrouting_core.routing.ledger import Worker
from kvrouting_core.routing.parameters import CacheAwareParameters
from kvrouting_core.routing.policy import CacheView

Rule = Callable[[Sequence[Candidate]], Candidate]


def fewest_in_flight(rng: random.Random) -> Rule:
    """The worker with the fewest requests in flight, ties at random."""
    return lambda candidates: least(candidates, rng, key=lambda c: c.in_flight)


def any_worker(rng: random.Random) -> Rule:
    """Each worker as likely."""
    return lambda candidates: candidates[rng.randrange(len(candidates))]


class InTurn:
    """Each worker in turn, in order of joining; the turn of one that may not be chosen falls to the next."""

    def __init__(self) -> None:
        self._turn = 0

    def __call__(self, candidates: Sequence[Candidate]) -> Candidate:
        """The next one."""
        chosen = candidates[self._turn % len(candidates)]
        self._turn += 1
        return chosen


class BlindChooser:
    """Chooses by a rule that looks neither at caches nor at times; all these terms are 0."""

    def __init__(self, rule: Rule, reason: Reason, *, admission: Admission) -> None:
        self._rule = rule
        self._reason = reason
        self._admission = admission

    def choose(
        self,
        request: RoutingRequest,
        workers: Sequence[Worker],
        *,
        now_ms: float,  # noqa: ARG002 - a Chooser is told the time
    ) -> Choice | Overload:
        """By the rule, among those with room."""
        candidates = tuple(_candidate(request, w, matched=0, credited=0) for w in workers)
        open_ = self._admission.open(candidates, workers)
        if not open_:
            return self._admission.overload(candidates, workers)
        return Choice(self._rule(open_), reason_for(candidates, self._reason), candidates)


class CacheAware:
    """SGLang's rule, in tokens and on the exact index.

    If the requests in flight differ too much, the least loaded worker; else, if the longest match is more than a
    share of the prompt, the worker that has it; else the worker with the smallest cache. As in the tree of SGLang's
    router, a prompt counts in match and size from its dispatch on.
    """

    def __init__(
        self,
        parameters: CacheAwareParameters,
        *,
        cache: CacheView,
        block_size_tokens: int,
        rng: random.Random,
        admission: Admission,
    ) -> None:
        self._parameters = parameters
        self._cache = cache
        self._block_size = block_size_tokens
        self._rng = rng
        self._admission = admission

    def choose(
        self,
        request: RoutingRequest,
        workers: Sequence[Worker],
        *,
        now_ms: float,  # noqa: ARG002 - a Chooser is told the time
    ) -> Choice | Overload:
        """By load, by match or by size; only workers with room are compared."""
        matched = self._cache.match(request.blocks) if len(request.blocks) else {}
        candidates = tuple(self._judged(request, w, matched.get(w.id, 0)) for w in workers)
        open_ = self._admission.open(candidates, workers)
        if not open_:
            return self._admission.overload(candidates, workers)
        sizes = {w.id: self._cache.count(w.id) + len(w.credit) for w in workers}
        reason = self._reason(request, open_)
        if reason is Reason.LEAST_LOAD:
            chosen = least(open_, self._rng, key=lambda c: c.in_flight)
        elif reason is Reason.LONGEST_PREFIX:
            chosen = least(open_, self._rng, key=lambda c: -c.credited_tokens)
        else:
            chosen = least(open_, self._rng, key=lambda c: sizes[c.worker])
        prefix = request.blocks[matched.get(chosen.worker, 0) :]
        return Choice(chosen, reason_for(candidates, reason), candidates, prefix)

    def _judged(self, request: RoutingRequest, worker: Worker, held: int) -> Candidate:
        size, prompt = self._block_size, request.prompt_tokens
        depth = worker.credit.depth(request.blocks, held)
        matched = worker.reusable_tokens(held * size, prompt)
        return _candidate(request, worker, matched=matched, credited=worker.reusable_tokens(depth * size, prompt))

    def _reason(self, request: RoutingRequest, candidates: Sequence[Candidate]) -> Reason:
        p = self._parameters
        loads = [c.in_flight for c in candidates]
        most, fewest = max(loads), min(loads)
        if most - fewest > p.imbalance_requests and most > p.imbalance_ratio * fewest:
            return Reason.LEAST_LOAD
        longest = max(c.credited_tokens for c in candidates)
        if longest > p.match_threshold * request.prompt_tokens:
            return Reason.LONGEST_PREFIX
        return Reason.SMALLEST_CACHE


def _candidate(request: RoutingRequest, worker: Worker, *, matched: int, credited: int) -> Candidate:
    uncached = request.prompt_tokens - credited + request.further_prompt_tokens
    return Candidate(worker.id, matched, credited, uncached, worker.in_flight, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
