"""A tokenizer without files, one token a byte: for simulated engines that were given no model's tokenizer."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence

from kvrouting_tokenization.chat_template import ChatTemplate

BYTE_TOKENIZER_NAME = "bytes"

_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>\n{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


class ByteTokenizer:
    """Token id = UTF-8 byte, 0..255; chat by a plain built-in template without special tokens."""

    fingerprint = "bytes-1"

    def __init__(self) -> None:
        self._template = ChatTemplate(_TEMPLATE, special_tokens={})

    def encode_prompt(self, text: str) -> Sequence[int]:
        """One id per UTF-8 byte; a lone surrogate counts as '?'."""
        return array("I", list(text.encode("utf-8", "replace")))

    def encode_chat(self, body: Mapping[str, object]) -> Sequence[int]:
        """Renders the built-in template and encodes it. Raises: ChatRequestError as the protocol says."""
        return self.encode_prompt(self._template.render(body))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of the ids modulo 256; what is no UTF-8 gives the replacement character."""
        return bytes(t & 0xFF for t in token_ids).decode("utf-8", "replace")
