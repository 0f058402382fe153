"""What a router that knows no engine sees: the text of prompts, and a tree of the texts that it sent to each worker.

For comparison only. The paper's code and SGLang's router measure prompts in characters, and their trees hear nothing of
evictions. Here a prompt is a chain of block hashes, so its text is simulated: each block has a length that follows from
its hash, distributed as that of the paper's generated prompts.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from statistics import NormalDist
from typing import NamedTuple

# Of one token of prompts drawn uniformly from Llama 3's vocabulary, the text of the generated shared prefixes.
MEAN_CHARACTERS = 5.56
SD_CHARACTERS = 3.74

TRIM_INTERVAL_MS = 60_000.0
TREE_CHARACTERS = 2**24

_WORD = 0xFFFFFFFFFFFFFFFF
_MIX = 0x9E3779B97F4A7C15
_REMEMBERED_BLOCKS = 2**16
_STANDARD_NORMAL = NormalDist()


class PromptText(NamedTuple):
    """lengths: characters of the first 0, 1, 2 ... blocks. total: of the whole prompt."""

    blocks: Sequence[int]
    lengths: Sequence[int]
    total: int


class SimulatedText:
    """Lengths of prompts in characters; the same blocks have the same length."""

    def __init__(self, block_size_tokens: int) -> None:
        self._block_size = block_size_tokens
        self._mean = MEAN_CHARACTERS * block_size_tokens
        self._sd = SD_CHARACTERS * math.sqrt(block_size_tokens)
        self._length = lru_cache(maxsize=_REMEMBERED_BLOCKS)(self._drawn_length)

    def prompt(self, blocks: Sequence[int], prompt_tokens: int) -> PromptText:
        """The text of a prompt; what is beyond its last full block has the mean length."""
        lengths = list(accumulate(map(self._length, blocks), initial=0))
        tail = round(MEAN_CHARACTERS * (prompt_tokens - len(blocks) * self._block_size))
        return PromptText(blocks, lengths, max(1, lengths[-1] + tail))

    def _drawn_length(self, block: int) -> int:
        """A sum of independent tokens: normal, at least a character a token."""
        uniform = ((block * _MIX & _WORD) + 0.5) / 2**64
        uniform = min(max(uniform, 1e-12), 1 - 1e-12)  # rounding to a float may give 1
        return max(self._block_size, round(self._mean + self._sd * _STANDARD_NORMAL.inv_cdf(uniform)))


class RoutedTexts:
    """The texts that one worker was sent, as the router remembers them: least recently used ends go every minute."""

    __slots__ = ("_blocks", "_trimmed_ms", "characters")

    def __init__(self) -> None:
        self._blocks: OrderedDict[int, int] = OrderedDict()  # least recently used first, ends before beginnings
        self._trimmed_ms = 0.0
        self.characters = 0

    def matched_blocks(self, text: PromptText) -> int:
        """Leading blocks of the prompt that the tree has, by bisection: what it has of a prompt has no holes."""
        blocks, held = text.blocks, self._blocks
        low, high = 0, len(blocks)
        while low < high:
            middle = (low + high + 1) // 2
            if blocks[middle - 1] in held:
                low = middle
            else:
                high = middle - 1
        return low

    def insert(self, text: PromptText, *, now_ms: float) -> None:
        """The prompt was sent, or answered: its text is used now."""
        if now_ms - self._trimmed_ms >= TRIM_INTERVAL_MS:
            self._trimmed_ms = now_ms - now_ms % TRIM_INTERVAL_MS
            self._trim()
        held, lengths = self._blocks, text.lengths
        for worker_index in range(len(text.blocks) - 1, -1, -1):
            block = text.blocks[worker_index]
            if block not in held:
                held[block] = lengths[worker_index + 1] - lengths[worker_index]
                self.characters += held[block]
            held.move_to_end(block)

    def _trim(self) -> None:
        while self.characters > TREE_CHARACTERS:
            _, length = self._blocks.popitem(last=False)
            self.characters -= length
