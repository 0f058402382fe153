"""A model's own tokenizer: tokenizer.json, its special tokens and its chat template."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Mapping, Sequence

import tokenizers

from kvrouting_tokenization.chat_template import ChatTemplate
from kvrouting_tokenization.chunk_cache import SAFE_CUT, ChunkCache
from kvrouting_tokenization.tokenizer import ChatRequestError

_CHUNK_CACHE_CHARACTERS = 64 * 1024 * 1024


class ModelTokenizer:
    """Tokenizes as the engine does that serves the same files.

    chat_template: source text; None if the model has none, then `encode_chat` refuses.
    special_tokens: names as templates use them → text.
    """

    def __init__(self, tokenizer_json: str, *, chat_template: str | None, special_tokens: Mapping[str, str]) -> None:
        # Hugging Face's tokenizers is the library that the engines themselves use.
        self._tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._template = (
            ChatTemplate(chat_template, special_tokens=special_tokens) if chat_template is not None else None
        )
        self._chunks = (
            ChunkCache(self._encode_batch, capacity_characters=_CHUNK_CACHE_CHARACTERS)
            if can_be_cut(json.loads(tokenizer_json)) and self._cuts_before_words()
            else None
        )
        self._before, self._after = self._added_special_ids()
        digest = hashlib.sha256(tokenizer_json.encode())
        digest.update((chat_template or "").encode())
        self.fingerprint = digest.hexdigest()[:16]

    def encode_prompt(self, text: str) -> Sequence[int]:
        """Ids with the special tokens that the post-processor adds (usually a leading BOS)."""
        return array("I", [*self._before, *self._encode(text), *self._after])

    def encode_chat(self, body: Mapping[str, object]) -> Sequence[int]:
        """Ids of the rendered conversation; the template itself writes the special tokens.

        Raises: ChatRequestError if the model has no template or it refuses the messages.
        """
        if self._template is None:
            raise ChatRequestError("this model has no chat template; use /v1/completions")
        return self._encode(self._template.render(body))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text without special tokens."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text

    def _encode(self, text: str) -> Sequence[int]:
        text = text.encode("utf-8", "replace").decode()  # a lone surrogate is no text
        if self._chunks is not None:
            return self._chunks.encode(text)
        return self._encode_batch([text])[0]

    def _encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        # The batch form releases the GIL, `encode` holds it.
        return [e.ids for e in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

    def _cuts_before_words(self) -> bool:
        """Asks the pre-tokenizer itself, as its patterns are the model's own: does it cut at each safe place?"""
        probe = "Alpha beta don't we're x1y gamma, delta  epsilon zeta.\nEta theta"
        starts = {span[0] for _, span in self._tokenizer.pre_tokenizer.pre_tokenize_str(probe)}
        return all(match.end() in starts for match in SAFE_CUT.finditer(probe))

    def _added_special_ids(self) -> tuple[list[int], list[int]]:
        probe = "a"
        bare = self._encode_batch([probe])[0]
        full: list[int] = self._tokenizer.encode(probe, add_special_tokens=True).ids
        for start in range(len(full) - len(bare) + 1):
            if full[start : start + len(bare)] == bare:
                return full[:start], full[start + len(bare) :]
        return [], []


def can_be_cut(description: Mapping[str, object]) -> bool:
    """Whether text may be cut between a letter and a space before a letter: byte-level BPE without surprises.

    description: the parsed tokenizer.json. SentencePiece-like models (Metaspace) and unknown ones may not.
    """
    model = description.get("model")
    if not isinstance(model, Mapping) or model.get("type") != "BPE" or model.get("dropout"):
        return False
    normalizer = description.get("normalizer")
    if isinstance(normalizer, Mapping) and normalizer.get("type") != "NFC":
        return False
    added = description.get("added_tokens")
    texts = [str(t.get("content", "")) for t in added if isinstance(t, Mapping)] if isinstance(added, Sequence) else []
    if any(" " in t for t in texts):
        return False
    kinds = _pre_tokenizer_kinds(description.get("pre_tokenizer"))
    return "ByteLevel" in kinds and kinds <= {"ByteLevel", "Split", "Digits"}


def _pre_tokenizer_kinds(node: object) -> set[str]:
    if not isinstance(node, Mapping):
        return set()
    if node.get("type") == "Sequence":
        parts = node.get("pretokenizers")
        return set().union(*map(_pre_tokenizer_kinds, parts)) if isinstance(parts, Sequence) else set()
    if node.get("type") == "ByteLevel" and node.get("add_prefix_space"):
        return {"ByteLevel with a prefix space"}  # each chunk would get a space of its own
    return {str(node.get("type"))}
