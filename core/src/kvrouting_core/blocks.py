"""Hashes of prefixes: one 64-bit number stands for a namespace and all tokens up to the end of a block.

The hash is a keyed prefix sum, so that numpy computes it without a loop over tokens:

    state(0)     = root(namespace)
    state(p + 1) = state(p) + mix(token_p, p)        modulo 2^64
    block hash   = finalize(state at the end of the block)

`root` is keyed BLAKE2b. `mix` is a keyed permutation of (token, position), two 32-bit numbers in one 64-bit
word: key, splitmix64's finaliser, key, MurmurHash3's finaliser. `finalize` is one more keyed permutation.

The sum is additive: whoever knows the key can build two different prompts with the same hash. So the key is a
secret of the pool, and a prompt's author, who does not know it, faces 64 pseudo-random bits. Two prefixes
then collide with probability 2^-64, that is about 3·10^-6 for some pair among 10^7 blocks; the price of a
collision is a prompt that is routed to a worker without its prefix, never a wrong answer. Neither a hash nor
a state is a cryptographic commitment: what hides the tokens is the key, and no token id leaves the pod.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NewType

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]
Tokens = Sequence[int] | npt.NDArray[Any]
"""Token ids 0..2^32-1: list, tuple, array('I') or numpy array of integers; array('I') and uint32 are fast."""

RoutingBlockSize = NewType("RoutingBlockSize", int)

_MASK = (1 << 64) - 1
_SIGN = 1 << 63
_MAX_TOKENS = 1 << 32
_MIN_KEY_BYTES, _MAX_KEY_BYTES = 16, 64
# Below this, numpy's fixed cost of about 20 µs a call exceeds that of a plain loop.
_LOOP_BELOW_TOKENS = 16
# Longer inputs are mixed piece by piece, so that the intermediate arrays stay in the core's cache.
_PIECE_TOKENS = 8192

_SHIFTED_POSITIONS: Words = np.arange(_PIECE_TOKENS, dtype=np.uint64) << np.uint64(32)
_SHIFTED_POSITIONS.flags.writeable = False


def routing_block_size(tokens: int) -> RoutingBlockSize:
    """The size of a routing block, checked: 16 to 128 tokens.

    Smaller blocks make the index large, larger ones lose what a prefix holds beyond its last full block.
    Raises: ValueError otherwise.
    """
    if not 16 <= tokens <= 128:
        raise ValueError(f"routing block size {tokens} is outside 16..128 tokens")
    return RoutingBlockSize(tokens)


def page_size(tokens: int) -> int:
    """The size of an engine's page, checked: 1 to 64 tokens. Raises: ValueError otherwise."""
    if not 1 <= tokens <= 64:
        raise ValueError(f"page size {tokens} is outside 1..64 tokens")
    return tokens


def to_signed(value: int) -> int:
    """The signed 64-bit number with the bits of an unsigned one, as SGLang's events carry hashes."""
    return value - (1 << 64) if value & _SIGN else value


def to_unsigned(value: int) -> int:
    """The unsigned 64-bit number with the bits of a signed one (or of an unsigned one: itself)."""
    return value & _MASK


def token_array(tokens: Tokens) -> npt.NDArray[np.uint32]:
    """The tokens as uint32, without a copy where the input allows it.

    Raises: ValueError for an id outside 0..2^32-1 or an array of another shape than (n,); TypeError for what
    is no integer.
    """
    if isinstance(tokens, np.ndarray):
        return _checked_array(tokens)
    if not (isinstance(tokens, array) and tokens.typecode == "I"):
        try:
            tokens = array("I", tokens)
        except OverflowError as error:
            raise ValueError(_id_message(min(tokens), max(tokens))) from error
    return np.frombuffer(tokens, dtype=np.uint32) if tokens else np.empty(0, dtype=np.uint32)


def _checked_array(tokens: npt.NDArray[Any]) -> npt.NDArray[np.uint32]:
    if tokens.ndim != 1:
        raise ValueError(f"tokens have shape {tokens.shape}, not (n,)")
    if tokens.dtype == np.uint32:
        return tokens
    if tokens.dtype.kind not in "iu":
        raise TypeError(f"tokens have dtype {tokens.dtype}, not an integer type")
    if tokens.size and (int(tokens.min()) < 0 or int(tokens.max()) >= _MAX_TOKENS):
        raise ValueError(_id_message(int(tokens.min()), int(tokens.max())))
    return tokens.astype(np.uint32)


def _id_message(least: int, greatest: int) -> str:
    return f"a token id is outside 0..2^32-1: least {least}, greatest {greatest}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Namespace:
    """What separates equal tokens: model, LoRA adapter, cache salt. None: the base model; no salt.

    It is part of each block's identity, so a prefix is never credited across it.
    """

    model: str
    lora_adapter: str | None = None
    cache_salt: str | None = None

    def encoded(self) -> bytes:
        """A byte string that no other namespace has: each part with its length, None apart from ""."""
        parts = (self.model, self.lora_adapter, self.cache_salt)
        return b"".join(_framed(part) for part in parts)


def _framed(part: str | None) -> bytes:
    if part is None:
        return b"\0"
    data = part.encode("utf-8", "surrogatepass")
    return b"\1" + len(data).to_bytes(8, "big") + data


class ChainHasher:
    """Hashes prefixes in blocks of a fixed size under one key. Immutable: threads may share it."""

    __slots__ = (
        "_after", "_between", "_final", "_final_word", "_key", "_key_id", "_mix_words", "_start",
        "block_size",
    )  # fmt: skip

    def __init__(self, key: bytes, block_size: int) -> None:
        """key: 16..64 secret random bytes. block_size: 1..128 tokens, a routing block or an engine's page.

        Raises: ValueError for another length or size.
        """
        if not _MIN_KEY_BYTES <= len(key) <= _MAX_KEY_BYTES:
            raise ValueError(f"the hash key has {len(key)} bytes, not {_MIN_KEY_BYTES}..{_MAX_KEY_BYTES}")
        if not 1 <= block_size <= 128:
            raise ValueError(f"block size {block_size} is outside 1..128 tokens")
        self.block_size = block_size
        self._key = bytes(key)
        self._key_id = hashlib.blake2b(key=self._key, digest_size=8, person=b"kvrouting-key-id").hexdigest()
        words = hashlib.blake2b(key=self._key, digest_size=32, person=b"kvrouting-mixing").digest()
        self._start, self._between, self._after, self._final = (
            int.from_bytes(words[i : i + 8], "little") for i in range(0, 32, 8)
        )
        self._mix_words = np.uint64(self._start), np.uint64(self._between), np.uint64(self._after)
        self._final_word = np.uint64(self._final)

    @property
    def key_id(self) -> str:
        """16 hexadecimal digits that name the key without revealing it, to compare in a handshake."""
        return self._key_id

    def root(self, namespace: Namespace) -> int:
        """The state before the first token of a namespace: 0..2^64-1."""
        digest = hashlib.blake2b(namespace.encoded(), key=self._key, digest_size=8, person=b"kvrouting-root--").digest()
        return int.from_bytes(digest, "little")

    def hash_blocks(self, namespace: Namespace, tokens: Tokens) -> Words:
        """The hashes of the full blocks of a prompt, in order: len(tokens) // block_size of them.

        Raises: as `token_array`.
        """
        ids = token_array(tokens)
        blocks = len(ids) // self.block_size
        sums = self._mixed(0, ids[: blocks * self.block_size]).reshape(blocks, self.block_size).sum(axis=1)
        np.cumsum(sums, out=sums)
        sums += np.uint64(self.root(namespace))
        return self.finalize(sums)

    def states(self, state: int, position: int, tokens: Tokens) -> Words:
        """The state after each token.

        state, position: those before the first of `tokens`.
        Raises: as `token_array`; ValueError for a position that is negative or leads beyond 2^32 tokens.
        """
        if len(tokens) < _LOOP_BELOW_TOKENS:
            return np.array(self._states_by_loop(state, position, tokens), dtype=np.uint64)
        mixed = self._mixed(position, token_array(tokens))
        np.cumsum(mixed, out=mixed)
        mixed += np.uint64(state)
        return mixed

    def finalize(self, states: Words) -> Words:
        """The block hash of each state, as a new array."""
        hashes = states ^ self._final_word
        _xorshift_multiply(hashes, np.empty_like(hashes), _MURMUR)
        return hashes

    def extend(self, state: int, position: int, tokens: Tokens) -> tuple[array[int], array[int]]:
        """Hashes of the complete blocks that `tokens` add to a prefix, and the state after each of them.

        state, position: those of the prefix. Returns: two array('Q') of length len(tokens) // block_size.
        Raises: ValueError if position or len(tokens) is no multiple of block_size; as `states`.
        """
        size, count = self.block_size, len(tokens)
        if position % size or count % size:
            raise ValueError(f"position {position} and {count} tokens must be multiples of block size {size}")
        if count < _LOOP_BELOW_TOKENS:
            ends = self._states_by_loop(state, position, tokens)[size - 1 :: size]
            return array("Q", [_murmur_word(end ^ self._final) for end in ends]), array("Q", ends)
        words = self.states(state, position, tokens)[size - 1 :: size]
        return array("Q", self.finalize(words).tobytes()), array("Q", words.tobytes())

    def _states_by_loop(self, state: int, position: int, tokens: Tokens) -> list[int]:
        ids = token_array(tokens).tolist()
        _check_span(position, len(ids))
        states = []
        for place, token in enumerate(ids, position):
            state = state + self._mix(token, place) & _MASK
            states.append(state)
        return states

    def _mix(self, token: int, position: int) -> int:
        word = _splitmix_word((position << 32 | token) ^ self._start)
        return _murmur_word((word + self._between & _MASK) ^ self._after)

    def _mixed(self, position: int, ids: npt.NDArray[np.uint32]) -> Words:
        """mix(token, position) of each token."""
        _check_span(position, len(ids))
        words = np.empty(len(ids), dtype=np.uint64)
        scratch = np.empty(min(len(ids), _PIECE_TOKENS), dtype=np.uint64)
        for start in range(0, len(ids), _PIECE_TOKENS):
            piece = words[start : start + _PIECE_TOKENS]
            np.add(_SHIFTED_POSITIONS[: len(piece)], ids[start : start + _PIECE_TOKENS], out=piece)
            piece += np.uint64(position + start << 32)
            self._mix_in_place(piece, scratch[: len(piece)])
        return words

    def _mix_in_place(self, words: Words, scratch: Words) -> None:
        start, between, after = self._mix_words
        np.bitwise_xor(words, start, words)
        _xorshift_multiply(words, scratch, _SPLITMIX)
        np.add(words, between, words)
        np.bitwise_xor(words, after, words)
        _xorshift_multiply(words, scratch, _MURMUR)


def _check_span(position: int, count: int) -> None:
    if position < 0 or position + count > _MAX_TOKENS:
        raise ValueError(f"{count} tokens at position {position} are outside 0..2^32")


# Finalisers of splitmix64 (Vigna's constants) and of MurmurHash3 (Appleby).
# The numpy scalars are made once: making one costs as much as a short vector operation.
_SPLITMIX = tuple(map(np.uint64, (30, 0xBF58476D1CE4E5B9, 27, 0x94D049BB133111EB, 31)))
_MURMUR = tuple(map(np.uint64, (33, 0xFF51AFD7ED558CCD, 33, 0xC4CEB9FE1A85EC53, 33)))


def _xorshift_multiply(words: Words, scratch: Words, constants: tuple[np.uint64, ...]) -> None:
    """One finaliser, in place: constants are shift, factor, shift, factor, shift."""
    first_shift, first_factor, second_shift, second_factor, last_shift = constants
    np.right_shift(words, first_shift, scratch)
    np.bitwise_xor(words, scratch, words)
    np.multiply(words, first_factor, words)
    np.right_shift(words, second_shift, scratch)
    np.bitwise_xor(words, scratch, words)
    np.multiply(words, second_factor, words)
    np.right_shift(words, last_shift, scratch)
    np.bitwise_xor(words, scratch, words)


def _splitmix_word(word: int) -> int:
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    word = (word ^ word >> 27) * 0x94D049BB133111EB & _MASK
    return word ^ word >> 31


def _murmur_word(word: int) -> int:
    word = (word ^ word >> 33) * 0xFF51AFD7ED558CCD & _MASK
    word = (word ^ word >> 33) * 0xC4CEB9FE1A85EC53 & _MASK
    return word ^ word >> 33
