"""What router and simulated engine need of a tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol


class ChatRequestError(ValueError):
    """A chat request that the model's template cannot render; the message is meant for the client."""


class Tokenizer(Protocol):
    """Thread-safe: the router calls it from a pool of threads."""

    @property
    def fingerprint(self) -> str:
        """Short id of the tokenizer and its chat template: equal ids give equal tokens for equal text."""

    def encode_prompt(self, text: str) -> Sequence[int]:
        """Token ids of a completion prompt, with the special tokens that the model's files add."""

    def encode_chat(self, body: Mapping[str, object]) -> Sequence[int]:
        """Token ids of an OpenAI chat request, generation prompt included.

        Raises: ChatRequestError if `messages` is no non-empty list of messages or the template refuses it.
        """

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of the ids; special tokens are left out, unknown ids give a replacement character or nothing."""
