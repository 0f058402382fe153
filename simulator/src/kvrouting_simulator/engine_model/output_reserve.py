"""How many slots SGLang keeps back for answers of running requests: a share of what they may still produce.

The share ("new token ratio") starts at .7, falls with each decode step to .098 within 600 of them, is estimated anew
from what was really produced when requests had to be retracted, and starts again when the engine is idle
(SGLang 0.5: `init_new_token_ratio`, `min_new_token_ratio_factor`, `new_token_ratio_decay_steps`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from kvrouting_simulator.engine_model.sequence import Sequence

_INITIAL_SHARE = 0.7
_LEAST_SHARE = 0.7 * 0.14
_DECAY_STEPS = 600
RETRACTION_HEADROOM_STEPS = 20
"""Decode steps for which a retraction makes room, so that the next step does not retract again."""
LONGEST_RESERVE_TOKENS = 4096
"""A single answer counts with at most so many tokens (SGLang's CLIP_MAX_NEW_TOKENS)."""


class OutputReserve:
    """The share, and the tokens that it keeps back."""

    def __init__(self) -> None:
        self.share = _INITIAL_SHARE

    def tokens(self, running: Iterable[Sequence], *, page_size: int = 1) -> float:
        """Slots kept back for the running requests: the share of each, in whole pages where pages are larger than 1.

        A request whose last page is full takes a whole page for its next token. The bare share would keep back a few
        slots for it, and a full engine would retract again and again.
        """
        expected = [(s.kv_tokens, self.share * min(s.remaining_output_tokens, LONGEST_RESERVE_TOKENS)) for s in running]
        if page_size == 1:
            return sum(tokens for _, tokens in expected)
        return sum(
            page_size * (math.ceil((held + tokens) / page_size) - math.ceil(held / page_size))
            for held, tokens in expected
        )

    def decoded(self) -> None:
        """A decode step went without a retraction."""
        self.share = max(_LEAST_SHARE, self.share - (_INITIAL_SHARE - _LEAST_SHARE) / _DECAY_STEPS)

    def retracted(self, kept: Iterable[Sequence]) -> None:
        """Requests were retracted; the others show how far answers get."""
        produced = allowed = 0
        for sequence in kept:
            produced += len(sequence.answer) + RETRACTION_HEADROOM_STEPS
            allowed += sequence.request.output_tokens
        self.share = min(1.0, produced / (allowed + 1))

    def idle(self) -> None:
        """The engine has nothing to do."""
        self.share = _INITIAL_SHARE
