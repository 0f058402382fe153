"""Prompts share prefixes, so most of a prompt was tokenized before: an exact cache of chunks of text.

Text is cut only where the pre-tokenizer of a byte-level BPE always cuts: after a letter and before a space
that is followed by a letter. Tokens never cross such a place, so the ids of the chunks in a row are the ids
of the text. What is left is cut at every such place, into words: most of them were seen in other texts.
"""

from __future__ import annotations

import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import chain

SAFE_CUT = re.compile(r"[A-Za-z](?= [A-Za-z])")
# Longer chunks hit less often, shorter ones cost more look-ups; 512 characters are about 100 tokens.
_MIN_CHUNK_CHARACTERS = 512
_EVERY_SAFE_PLACE = re.compile(r"(?<=[A-Za-z])(?= [A-Za-z])")
# A language's common words and their inflections; about 200 bytes each.
_KEPT_WORDS = 200_000
# What lies longer between two safe places (code, numbers, other scripts) is rarely seen again.
_LONGEST_WORD_CHARACTERS = 32


def cut_safely(text: str) -> list[str]:
    """Cuts `text` at safe places into chunks of at least 512 characters, the last one shorter.

    Texts with one beginning share their first chunks.
    """
    chunks = []
    start = 0
    while cut := SAFE_CUT.search(text, start + _MIN_CHUNK_CHARACTERS):
        chunks.append(text[start : cut.end()])
        start = cut.end()
    chunks.append(text[start:])
    return chunks


class ChunkCache:
    """Token ids by chunk of text, least recently used first out, and by word, all forgotten when they are too many.

    encode_batch: ids of each text, without special tokens.
    capacity_characters: of all keys together.
    """

    def __init__(
        self, encode_batch: Callable[[Sequence[str]], Sequence[Sequence[int]]], *, capacity_characters: int
    ) -> None:
        if capacity_characters < 1:
            raise ValueError(f"capacity_characters must be positive, got {capacity_characters}")
        self._encode_batch = encode_batch
        self._capacity = capacity_characters
        self._ids: OrderedDict[str, array[int]] = OrderedDict()
        self._characters = 0
        self._words: dict[str, tuple[int, ...]] = {}
        self._lock = threading.Lock()

    def encode(self, text: str) -> array[int]:
        """Ids of the text; only chunks that were not seen are tokenized."""
        chunks = cut_safely(text)
        found = self._look_up(chunks)
        missing = [c for c, ids in zip(chunks, found, strict=True) if ids is None]
        fresh = iter(self._learn(missing) if missing else ())
        result = array("I")
        for ids in found:
            result.extend(next(fresh) if ids is None else ids)
        return result

    @property
    def characters(self) -> int:
        """Characters held now, at most the capacity."""
        return self._characters

    def _look_up(self, chunks: Sequence[str]) -> list[array[int] | None]:
        with self._lock:
            found = []
            for chunk in chunks:
                ids = self._ids.get(chunk)
                if ids is not None:
                    self._ids.move_to_end(chunk)
                found.append(ids)
            return found

    def _encode_words(self, chunks: Sequence[str]) -> list[array[int]]:
        """Ids of each chunk, word by word; only words that are not known are tokenized, all together."""
        cut = [_EVERY_SAFE_PLACE.split(chunk) for chunk in chunks]
        known = self._words  # never cleared, only replaced: another thread may forget while this one reads
        missing = [word for word in dict.fromkeys(chain.from_iterable(cut)) if word not in known]
        fresh = dict(zip(missing, map(tuple, self._encode_batch(missing)), strict=True)) if missing else {}
        result = [array("I", chain.from_iterable(known.get(w) or fresh[w] for w in words)) for words in cut]
        lasting = {word: ids for word, ids in fresh.items() if len(word) <= _LONGEST_WORD_CHARACTERS}
        if len(known) + len(lasting) > _KEPT_WORDS:
            self._words = lasting
        else:
            known.update(lasting)
        return result

    def _learn(self, chunks: Sequence[str]) -> list[array[int]]:
        fresh = self._encode_words(chunks)
        with self._lock:
            for chunk, ids in zip(chunks, fresh, strict=True):
                # The last chunk of most prompts is short and unique, but so is its share of the capacity.
                if chunk not in self._ids:
                    self._ids[chunk] = ids
                    self._characters += len(chunk)
            while self._characters > self._capacity:
                oldest, _ = self._ids.popitem(last=False)
                self._characters -= len(oldest)
        return fresh
