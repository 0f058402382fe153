"""When a worker has room for one more request of the router's queue.

Engines run a prefill before any decode step, so what waits inside an engine starves the answers that have begun there,
and cannot be planned again. A worker gets just enough to keep it busy.
"""

from __future__ import annotations

import math

from kvrouting_core.routing.parameters import LbgrParameters
from kvrouting_core.routing.station import Station

_AHEAD_PER_DECODE = 10.0


class Release:
    """Room: own work without a first token below H, and requests in flight below c.

    An engine that decodes between prefills (`prefill_decode_interval` N) starves no answer, so c does not apply. It
    takes one batch of prefills in N decode steps, and what is not there when the batch is made waits for the next one:
    with H ahead, prefill has H/(H + N·step) of its time. So H is ten times N·step, which loses a tenth, or a full batch
    with the steps after it if that is less. Mixed chunks need neither: decodes and prefills share each step.
    """

    def __init__(self, parameters: LbgrParameters, *, max_in_flight: int) -> None:
        self._ahead_ms = parameters.release_ahead_ms
        self._follows_scheduler = parameters.follow_scheduler
        self._theta = parameters.decode_limit
        self._max_in_flight = max_in_flight

    def has_room(
        self,
        station: Station,
        *,
        own_ms: float,
        in_flight: int,
        others: int,
        answer_tokens: float,
        mean_work_ms: float,
        crowding: float,
    ) -> bool:
        """own_ms: own work there without a first token. others: requests of others. answer_tokens: m̂.

        mean_work_ms: s̄, prefill of a request of mean size there. crowding: waiting requests per worker.
        """
        alternates = self._follows_scheduler and station.scheduler.prefill_decode_interval > 0
        ahead_ms = max(self._ahead_ms, _ahead_of_cycle_ms(station)) if alternates else self._ahead_ms
        if in_flight >= self._max_in_flight or own_ms >= ahead_ms:
            return False
        if alternates or not self._theta:
            return True
        return in_flight < self.decode_limit(station, others, answer_tokens, mean_work_ms, crowding)

    def decode_limit(
        self, station: Station, others: int, answer_tokens: float, mean_work_ms: float, crowding: float
    ) -> int:
        """c: decode may take about 1/θ of prefill's time, more when the queue is long."""
        share = self._theta * answer_tokens * station.step_ms / mean_work_ms
        return max(1, math.ceil(share * math.sqrt(max(1.0, crowding))) - others)


def _ahead_of_cycle_ms(station: Station) -> float:
    """Least H for an engine that decodes between prefills."""
    scheduler = station.scheduler
    decode_ms = scheduler.prefill_decode_interval * station.step_ms
    tokens = min(scheduler.chunked_prefill_tokens, scheduler.max_prefill_tokens)
    full_batch_ms = station.speed * station.times.prefill_work_ms(0, tokens)
    return min(_AHEAD_PER_DECODE * decode_ms, full_batch_ms + decode_ms)
