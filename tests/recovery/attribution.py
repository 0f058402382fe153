"""Why an engine found another prefix than the router had matched, by the engine's own event log."""

from __future__ import annotations

from tests.recovery.event_log import EventLog
from tests.recovery.pool_under_test import BLOCK_TOKENS, Answer

# Deltas, the request's way to the engine and the wait for its admission: a decision may rest on a view this old.
VIEW_AGE_S = 2.0


def cause(answer: Answer, log: EventLog, *, block_tokens: int = BLOCK_TOKENS, view_age_s: float = VIEW_AGE_S) -> str:
    """Why the engine found another prefix than the router saw: `none`, a cause, or `unexplained`.

    The router must have seen what the engine held at one moment shortly before or during the request, and the engine
    must have found what it held at a later one. Their order tells whether pages went or came meanwhile. A request may
    be admitted between two batches or in the midst of an event that removes many pages: what the engine then finds lies
    between what it held before and after.
    """
    limit = len(answer.prompt) - 1
    if answer.matched_tokens <= answer.cached_tokens < answer.matched_tokens + block_tokens:
        return "none"
    moments = [(s, min(held, limit)) for s, held in log.cached_prefix(answer.prompt)]
    before = [held for s, held in moments if s < answer.sent_unix_s - view_age_s][-1:] or [0]
    window = before + [held for s, held in moments if answer.sent_unix_s - view_age_s <= s <= answer.ended_unix_s]
    seen = [i for i, held in enumerate(window) if held // block_tokens * block_tokens == answer.matched_tokens]
    found = [
        i
        for i, (held, next_held) in enumerate(zip(window, [*window[1:], window[-1]], strict=True))
        if min(held, next_held) <= answer.cached_tokens <= max(held, next_held)
    ]
    if not seen or not found or seen[0] > found[-1]:
        return "unexplained"
    return "evicted meanwhile" if answer.cached_tokens < answer.matched_tokens else "stored meanwhile"
