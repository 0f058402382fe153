"""`cache_aware-released`: SGLang's cache-aware router as it ran in the paper's evaluation. For experiments only.

The rule is that of `cache_aware`; the prefixes and the sizes are those of the router's own tree of texts, in
characters, which no eviction reaches. The paper's generated prompts share half of their tokens: in characters that is
more than half for some prompts and less for others, so a threshold of .5 splits them by chance.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from kvrouting_core.identity import WorkerId
from kvrouting_core.routing.admission import Admission, Overload
from kvrouting_core.routing.choice import Choice, least, reason_for
from kvrouting_core.routing.decision import Candidate, Reason
from kvrouting_core.routing.events import Ended, RoutingRequest
from kvrouting_core.routing.ledger import Reservation, Worker
from kvrouting_core.routing.parameters import CacheAwareParameters
from kvrouting_core.routing.policy import WorkerBelief
from kvrouting_core.routing.router_text import MEAN_CHARACTERS, PromptText, RoutedTexts, SimulatedText


class ReleasedCacheAware:
    """By load if it differs too much, else by the longest match if it is long enough, else the smallest tree."""

    def __init__(
        self,
        parameters: CacheAwareParameters,
        *,
        block_size_tokens: int,
        rng: random.Random,
        admission: Admission,
    ) -> None:
        self._parameters = parameters
        self._block_size = block_size_tokens
        self._text = SimulatedText(block_size_tokens)
        self._rng = rng
        self._admission = admission
        self._texts: dict[WorkerId, RoutedTexts] = {}
        self._judged: PromptText | None = None

    def choose(
        self,
        request: RoutingRequest,
        workers: Sequence[Worker],
        *,
        now_ms: float,  # noqa: ARG002 - a Chooser is told the time
    ) -> Choice | Overload:
        """Only workers with room are compared."""
        text = self._judged = self._text.prompt(request.blocks, request.prompt_tokens)
        matched = {w.id: self._texts[w.id].matched_blocks(text) for w in workers}
        candidates = tuple(self._judged_at(request, w, matched[w.id]) for w in workers)
        open_ = self._admission.open(candidates, workers)
        if not open_:
            return self._admission.overload(candidates, workers)
        characters = {worker: text.lengths[blocks] for worker, blocks in matched.items()}
        reason = self._reason(open_, max(characters[c.worker] for c in open_), text.total)
        if reason is Reason.LEAST_LOAD:
            chosen = least(open_, self._rng, key=lambda c: c.in_flight)
        elif reason is Reason.LONGEST_PREFIX:
            chosen = least(open_, self._rng, key=lambda c: -characters[c.worker])
        else:
            chosen = least(open_, self._rng, key=lambda c: self._texts[c.worker].characters)
        return Choice(chosen, reason_for(candidates, reason), candidates)

    def _judged_at(self, request: RoutingRequest, worker: Worker, blocks: int) -> Candidate:
        held = worker.reusable_tokens(blocks * self._block_size, request.prompt_tokens)
        uncached = request.prompt_tokens - held + request.further_prompt_tokens
        return Candidate(worker.id, held, held, uncached, worker.in_flight, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)

    def _reason(self, candidates: Sequence[Candidate], longest: int, total: int) -> Reason:
        p = self._parameters
        loads = [c.in_flight for c in candidates]
        most, fewest = max(loads), min(loads)
        if most - fewest > p.imbalance_requests and most > p.imbalance_ratio * fewest:
            return Reason.LEAST_LOAD
        return Reason.LONGEST_PREFIX if longest > p.match_threshold * total else Reason.SMALLEST_CACHE

    def joined(self, worker: Worker, *, anew: bool) -> None:
        """An empty tree."""
        if anew:
            self._texts[worker.id] = RoutedTexts()

    def left(self, worker: Worker) -> None:
        """Forgets the worker."""
        del self._texts[worker.id]

    def reserved(self, reservation: Reservation, chosen: Candidate) -> None:
        """The text counts as cached at once. Raises: RuntimeError if nothing was judged before."""
        if self._judged is None:
            raise RuntimeError(f"{reservation.request.request_id} was reserved and not judged")
        self._texts[chosen.worker].insert(self._judged, now_ms=reservation.dispatched_ms)

    def first_token(self, reservation: Reservation, *, now_ms: float) -> None:
        """Changes nothing."""

    def ended(self, reservation: Reservation, event: Ended, *, now_ms: float) -> None:
        """Changes nothing: requests in flight are counted elsewhere."""

    def belief(self, worker: Worker, *, now_ms: float) -> WorkerBelief:  # noqa: ARG002 - an Observer is told the time
        """It believes nothing of times."""
        return WorkerBelief(
            worker=worker.id,
            eligible=worker.eligible,
            in_flight=worker.in_flight,
            queue_ms=0.0,
            residual_ms=0.0,
            prefill_ms_per_token=MEAN_CHARACTERS,
            speed_factor=1.0,
            observations=0,
        )
