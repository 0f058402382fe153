"""Block hashes against a plain definition, and what they must tell apart."""

from __future__ import annotations

import hashlib
import random
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrouting_core.blocks import (
    ChainHasher,
    Namespace,
    page_size,
    routing_block_size,
    to_signed,
    to_unsigned,
    token_array,
)

KEY = bytes(range(32))
ANY_TIME = settings(deadline=None)  # how long an example takes depends on what else the machine does
MODULUS = 2**64

tokens_of_any_length = st.lists(st.integers(0, 2**32 - 1), max_size=150)
block_sizes = st.integers(1, 128)
namespaces = st.builds(
    Namespace,
    model=st.text(max_size=5),
    lora_adapter=st.none() | st.text(max_size=5),
    cache_salt=st.none() | st.text(max_size=5),
)


class PlainDefinition:
    """The formulas of the module's docstring, one number at a time."""

    def __init__(self, key: bytes) -> None:
        self.key = key
        raw = hashlib.blake2b(key=key, digest_size=32, person=b"kvrouting-mixing").digest()
        self.k0, self.k1, self.k2, self.k3 = (int.from_bytes(raw[8 * i : 8 * i + 8], "little") for i in range(4))

    def root(self, namespace: Namespace) -> int:
        data = hashlib.blake2b(namespace.encoded(), key=self.key, digest_size=8, person=b"kvrouting-root--").digest()
        return int.from_bytes(data, "little")

    def mix(self, token: int, position: int) -> int:
        x = (position * 2**32 + token) ^ self.k0
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % MODULUS
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % MODULUS
        x = x ^ (x >> 31)
        return self.murmur((x + self.k1) % MODULUS ^ self.k2)

    def murmur(self, x: int) -> int:
        x = (x ^ (x >> 33)) * 0xFF51AFD7ED558CCD % MODULUS
        x = (x ^ (x >> 33)) * 0xC4CEB9FE1A85EC53 % MODULUS
        return x ^ (x >> 33)

    def states(self, state: int, position: int, tokens: Sequence[int]) -> list[int]:
        states = []
        for offset, token in enumerate(tokens):
            state = (state + self.mix(token, position + offset)) % MODULUS
            states.append(state)
        return states

    def hash_blocks(self, namespace: Namespace, tokens: Sequence[int], size: int) -> list[int]:
        states = self.states(self.root(namespace), 0, tokens)
        return [self.murmur(states[end - 1] ^ self.k3) for end in range(size, len(tokens) + 1, size)]


@ANY_TIME
@given(namespaces, tokens_of_any_length, block_sizes)
def test_hashes_follow_the_definition(namespace: Namespace, tokens: list[int], size: int) -> None:
    hashes = ChainHasher(KEY, size).hash_blocks(namespace, tokens)
    assert hashes.dtype == np.uint64
    assert hashes.tolist() == PlainDefinition(KEY).hash_blocks(namespace, tokens, size)


@ANY_TIME
@given(st.integers(0, 2**64 - 1), st.integers(0, 2**31), tokens_of_any_length)
def test_states_follow_the_definition(state: int, position: int, tokens: list[int]) -> None:
    assert ChainHasher(KEY, 16).states(state, position, tokens).tolist() == PlainDefinition(KEY).states(
        state, position, tokens
    )


def test_long_inputs_are_mixed_in_pieces_without_a_seam() -> None:
    hasher = ChainHasher(KEY, 100)
    tokens = np.random.default_rng(7).integers(0, 2**32, 20_000, dtype=np.uint32)
    whole = hasher.states(5, 0, tokens)
    assert whole[-1] == hasher.states(int(whole[9_998]), 9_999, tokens[9_999:])[-1]
    assert hasher.hash_blocks(Namespace(model="m"), tokens).tolist() == PlainDefinition(KEY).hash_blocks(
        Namespace(model="m"), tokens.tolist(), 100
    )


@ANY_TIME
@given(st.integers(1, 64), st.integers(0, 30), st.integers(0, 30), st.integers(0, 10**6))
def test_extending_a_prefix_equals_hashing_the_whole(size: int, before: int, after: int, seed: int) -> None:
    hasher, namespace = ChainHasher(KEY, size), Namespace(model="m", cache_salt="s")
    chance = random.Random(seed)
    tokens = [chance.randrange(50_000) for _ in range((before + after) * size)]
    cut = before * size
    state = int(hasher.states(hasher.root(namespace), 0, tokens[:cut])[-1]) if before else hasher.root(namespace)
    hashes, states = hasher.extend(state, cut, tokens[cut:])
    assert hashes.typecode == states.typecode == "Q"
    assert hashes.tolist() == hasher.hash_blocks(namespace, tokens).tolist()[before:]
    assert hasher.finalize(np.array(states, dtype=np.uint64)).tolist() == hashes.tolist()


@pytest.mark.parametrize(
    "convert",
    [
        list,
        tuple,
        lambda ids: array("I", ids),
        lambda ids: array("Q", ids),
        lambda ids: np.array(ids, dtype=np.int64),
        lambda ids: np.array(ids, dtype=np.uint32),
        lambda ids: np.array([(i, 0) for i in ids], dtype=np.int32)[:, 0],
    ],
)
def test_every_container_of_tokens_gives_the_same_hashes(convert: Callable[[list[int]], Any]) -> None:
    ids = list(range(1000, 1070))
    hasher, namespace = ChainHasher(KEY, 16), Namespace(model="m")
    assert hasher.hash_blocks(namespace, convert(ids)).tolist() == hasher.hash_blocks(namespace, ids).tolist()
    assert hasher.extend(3, 16, convert(ids[:64])) == hasher.extend(3, 16, ids[:64])


@ANY_TIME
@given(st.lists(st.integers(0, 1000), min_size=32, max_size=80), st.data())
def test_a_hash_depends_on_every_token_up_to_its_end_and_on_none_after(tokens: list[int], data: Any) -> None:
    hasher, namespace = ChainHasher(KEY, 16), Namespace(model="m")
    changed_at = data.draw(st.integers(0, len(tokens) - 1))
    other = [*tokens]
    other[changed_at] += 1
    before, after = hasher.hash_blocks(namespace, tokens), hasher.hash_blocks(namespace, other)
    same = before == after
    assert same[: changed_at // 16].all()
    assert not same[changed_at // 16 :].any()


def test_order_position_namespace_and_key_matter() -> None:
    ids = list(range(16))
    plain = Namespace(model="m")
    variants = [
        ChainHasher(KEY, 16).hash_blocks(plain, ids),
        ChainHasher(KEY, 16).hash_blocks(plain, [1, 0, *ids[2:]]),
        ChainHasher(KEY, 16).hash_blocks(plain, ids * 2)[1:],
        ChainHasher(KEY[::-1], 16).hash_blocks(plain, ids),
        ChainHasher(KEY, 16).hash_blocks(Namespace(model="n"), ids),
        ChainHasher(KEY, 16).hash_blocks(Namespace(model="m", lora_adapter="a"), ids),
        ChainHasher(KEY, 16).hash_blocks(Namespace(model="m", cache_salt="a"), ids),
        ChainHasher(KEY, 16).hash_blocks(Namespace(model="m", lora_adapter=""), ids),
        ChainHasher(KEY, 16).hash_blocks(Namespace(model="m", lora_adapter="a", cache_salt=""), ids),
    ]
    assert len({int(hashes[0]) for hashes in variants}) == len(variants)


@ANY_TIME
@given(namespaces, namespaces)
def test_different_namespaces_have_different_encodings(one: Namespace, other: Namespace) -> None:
    assert (one.encoded() == other.encoded()) == (one == other)


def test_no_collision_and_even_bits_among_similar_prompts() -> None:
    """Neighbouring tokens and positions are the inputs that a weak mixing would map to neighbouring sums."""
    hasher = ChainHasher(KEY, 1)
    hashes = np.concatenate([hasher.hash_blocks(Namespace(model="m"), [token] * 200) for token in range(200)])
    assert len(np.unique(hashes)) == 200 * 200
    ones = ((hashes[:, None] >> np.arange(64, dtype=np.uint64)) & np.uint64(1)).mean(axis=0)
    # 40000 fair coins: one standard deviation is .0025, so .015 is six of them.
    assert np.abs(ones - 0.5).max() < 0.015


def test_a_key_id_names_the_key_and_not_the_block_size() -> None:
    key_id = ChainHasher(KEY, 16).key_id
    assert key_id == ChainHasher(KEY, 64).key_id
    assert key_id != ChainHasher(KEY[::-1], 16).key_id
    assert len(key_id) == 16
    assert KEY.hex()[:8] not in key_id


@pytest.mark.parametrize("tokens", [[-1], [2**32], np.array([-1]), np.array([2**32])])
def test_an_impossible_token_id_is_named(tokens: Any) -> None:
    with pytest.raises(ValueError, match=rf"least {tokens[0]}"):
        token_array(tokens)


@pytest.mark.parametrize("tokens", [[1.5], ["a"], [(1, 2)], np.array([1.5])])
def test_what_is_no_token_id_is_refused(tokens: Any) -> None:
    with pytest.raises(TypeError):
        token_array(tokens)


def test_bad_sizes_positions_and_keys_are_named() -> None:
    with pytest.raises(ValueError, match="8 bytes"):
        ChainHasher(b"tooshort", 16)
    with pytest.raises(ValueError, match="block size 129"):
        ChainHasher(KEY, 129)
    with pytest.raises(ValueError, match="position 3"):
        ChainHasher(KEY, 2).extend(0, 3, [1, 2])
    with pytest.raises(ValueError, match="3 tokens"):
        ChainHasher(KEY, 2).extend(0, 2, [1, 2, 3])
    with pytest.raises(ValueError, match="position 4294967295"):
        ChainHasher(KEY, 1).states(0, 2**32 - 1, [1, 2])
    with pytest.raises(ValueError, match=r"shape \(1, 2\)"):
        token_array(np.array([[1, 2]]))


def test_routing_blocks_and_pages_have_their_own_limits() -> None:
    assert (routing_block_size(16), routing_block_size(128), page_size(1), page_size(64)) == (16, 128, 1, 64)
    for check, wrong in ((routing_block_size, (15, 129)), (page_size, (0, 65))):
        for size in wrong:
            with pytest.raises(ValueError, match=str(size)):
                check(size)


@ANY_TIME
@given(st.integers(-(2**63), 2**64 - 1))
def test_signed_and_unsigned_carry_the_same_bits(value: int) -> None:
    assert to_signed(to_unsigned(value)).to_bytes(8, "big", signed=True) == (value % MODULUS).to_bytes(8, "big")
    assert to_unsigned(to_signed(to_unsigned(value))) == value % MODULUS
