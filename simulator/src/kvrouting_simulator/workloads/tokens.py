"""Token ids by the million: drawn from a seeded generator, or derived from a block's identity."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

VOCABULARY_SIZE = 128_000
"""Text tokens of the Llama 3 tokenizers; their special tokens come after them."""

_U64 = np.uint64


def drawn(rng: np.random.Generator, count: int, vocabulary_size: int = VOCABULARY_SIZE) -> array[int]:
    """`count` tokens, uniform over the vocabulary."""
    return as_tokens(rng.integers(0, vocabulary_size, count, dtype=np.uint32))


def of_blocks(
    hash_ids: Sequence[int], block_tokens: int, count: int, vocabulary_size: int = VOCABULARY_SIZE
) -> array[int]:
    """The first `count` tokens of a chain of blocks; token j of block id h is the same wherever h occurs.

    hash_ids: each from 0 to 2^47. The tokens are splitmix64 of (id, position in the block), scaled.
    """
    words = np.asarray(hash_ids, dtype=_U64)[:, None] << _U64(16) | np.arange(block_tokens, dtype=_U64)
    return as_tokens(_scaled(_mixed(words.reshape(-1)[:count]), vocabulary_size))


def as_tokens(values: npt.NDArray[np.uint32]) -> array[int]:
    """The same numbers as array('I')."""
    tokens = array("I")
    tokens.frombytes(values.tobytes())
    return tokens


def _mixed(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """splitmix64 (Steele, Lea, Flood 2014)."""
    words = words + _U64(0x9E3779B97F4A7C15)
    words = (words ^ words >> _U64(30)) * _U64(0xBF58476D1CE4E5B9)
    words = (words ^ words >> _U64(27)) * _U64(0x94D049BB133111EB)
    return words ^ words >> _U64(31)


def _scaled(words: npt.NDArray[np.uint64], vocabulary_size: int) -> npt.NDArray[np.uint32]:
    return ((words >> _U64(32)) * _U64(vocabulary_size) >> _U64(32)).astype(np.uint32)
