"""Whether a worker's reported cached tokens agree with what the router predicted: a silent mismatch shows here."""

from __future__ import annotations

# Half of what is remembered is younger than about 35 requests: long enough to outlast a burst of evictions.
_KEPT = 0.98
_ENOUGH = 20
# A wrong tokenizer or template misses nearly everything; evictions between decision and prefill cost a few percent.
_FLAG_ABOVE_SHARE = 0.15


class Agreement:
    """Decayed sums over one worker's single-prompt requests whose engine reported cached tokens."""

    def __init__(self, *, block_size_tokens: int) -> None:
        self._slack = block_size_tokens
        self._error_tokens = 0.0
        self._prompt_tokens = 0.0
        self._predicted_tokens = 0.0
        self._reported_tokens = 0.0
        self.observations = 0

    def observe(self, *, matched_tokens: int, credited_tokens: int, reported_tokens: int, prompt_tokens: int) -> None:
        """One request's outcome.

        The truth lies between what was matched and what in-flight credit added, give or take a block: an engine
        also reuses the part of a block.
        """
        short = matched_tokens - self._slack - reported_tokens
        beyond = reported_tokens - credited_tokens - self._slack
        self._error_tokens = _KEPT * self._error_tokens + max(0, short, beyond)
        self._prompt_tokens = _KEPT * self._prompt_tokens + prompt_tokens
        self._predicted_tokens = _KEPT * self._predicted_tokens + matched_tokens
        self._reported_tokens = _KEPT * self._reported_tokens + reported_tokens
        self.observations += 1

    @property
    def disagreement(self) -> float:
        """Share of recent prompt tokens on which prediction and report differ, 0..1; 0 before any observation."""
        return self._error_tokens / self._prompt_tokens if self._prompt_tokens else 0.0

    @property
    def is_mismatched(self) -> bool:
        """They have disagreed for long: tokenizer, template, page or key differ between router and engine."""
        return self.observations >= _ENOUGH and self.disagreement > _FLAG_ABOVE_SHARE

    def as_dict(self) -> dict[str, object]:
        """Plain values for the pages."""
        return {
            "observations": self.observations,
            "predicted_share": self._share(self._predicted_tokens),
            "reported_share": self._share(self._reported_tokens),
            "disagreement_share": round(self.disagreement, 4),
            "mismatch": self.is_mismatched,
        }

    def _share(self, tokens: float) -> float | None:
        return round(tokens / self._prompt_tokens, 4) if self._prompt_tokens else None
