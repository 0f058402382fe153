"""The engine's own wire: event batches, load reports and the answers of the state socket, decoded from msgpack."""

from __future__ import annotations

from typing import TypeVar

import msgspec


class UndecodableError(ValueError):
    """Bytes of the engine that are not what it is known to send."""


class BlockStored(msgspec.Struct, tag=True, gc=False):
    """Chained pages that became cached: `token_ids` are those of all of them, `block_size` each."""

    block_hashes: list[int]
    token_ids: list[int]
    block_size: int
    parent_block_hash: int | None = None
    lora_id: int | None = None
    medium: str | None = None
    cache_salt: str | None = None
    lora_name: str | None = None

    @property
    def lora_adapter(self) -> str | None:
        """The adapter's name; an engine that tells only its number is taken at that."""
        if self.lora_name is not None or self.lora_id is None:
            return self.lora_name
        return f"lora:{self.lora_id}"


class BlockRemoved(msgspec.Struct, tag=True, gc=False):
    """Pages that are no longer cached."""

    block_hashes: list[int]
    medium: str | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, gc=False):
    """No page is cached any more."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True, gc=False):
    """What one scheduler step changed. ts: seconds since 1970."""

    ts: float
    events: list[Event]
    attn_dp_rank: int | None = None


class LoadStat(msgspec.Struct, array_like=True, tag=True, gc=False):
    """A rank's load, in the order in which SGLang publishes it."""

    running_requests: int
    waiting_requests: int
    used_tokens: int
    max_total_tokens: int
    dp_rank: int = 0
    waiting_uncached_tokens: int = 0
    total_tokens: int = 0
    max_running_requests: int = 0
    total_prefill_uncached_tokens: int = 0
    total_prefill_busy_us: int = 0


class Eviction(msgspec.Struct, gc=False):
    """The eviction policy as the engine itself reports it at work; what a policy does not report is None.

    Of rlt-adaptive, in tokens: phi: how far it is behind RLT; beyond phi_limit it is in safe mode until that is paid
    back; it never passes phi_bound. own_loaded, ghost_loaded: what it and the RLT beside it had to load.
    """

    policy: str = ""
    live: bool = False
    evicted_tokens: int | None = None
    phi_tokens: int | None = None
    phi_limit_tokens: int | None = None
    phi_bound_tokens: int | None = None
    safe_mode: bool | None = None
    safe_entries: int | None = None
    own_loaded_tokens: int | None = None
    ghost_loaded_tokens: int | None = None


class EngineState(msgspec.Struct, gc=False):
    """The state socket's answer: count and digest of the live pages after all batches below `sequence`.

    events_port: where this rank publishes its events; None: it does not say.
    """

    epoch: str
    sequence: int
    pages: int
    digest: int
    page_size: int = 0
    capacity_tokens: int = 0
    cached_tokens: int = 0
    events_port: int | None = None
    eviction: Eviction = msgspec.field(default_factory=Eviction)


class _Refusal(msgspec.Struct, gc=False):
    """The part of an answer of the state socket that says why there is none."""

    error: str | None = None


class _Position(msgspec.Struct, gc=False):
    """The part of a state answer that an engine leaves out if it hashes no pages."""

    sequence: int | None = None
    pages: int | None = None
    digest: int | None = None


class SnapshotChunk(msgspec.Struct, gc=False):
    """One piece of the engine's tree."""

    epoch: str
    position: int
    events: list[BlockStored]
    end: bool = False


T = TypeVar("T")

_batches = msgspec.msgpack.Decoder(EventBatch)
_loads = msgspec.msgpack.Decoder(LoadStat)
_refusals = msgspec.msgpack.Decoder(_Refusal)
_positions = msgspec.msgpack.Decoder(_Position)
_states = msgspec.msgpack.Decoder(EngineState)
_chunks = msgspec.msgpack.Decoder(SnapshotChunk)


def decode_batch(payload: bytes) -> EventBatch:
    """Raises: UndecodableError, also for a kind of event that is not known: what it changed is not known either."""
    return _decoded(_batches, payload, "event batch")


def decode_load(payload: bytes) -> LoadStat:
    """Raises: UndecodableError."""
    return _decoded(_loads, payload, "load report")


def decode_state(payload: bytes) -> EngineState:
    """Raises: UndecodableError, also for what the engine says in place of its state, and for an engine that hashes no
    pages: nothing can be compared with its state.
    """
    _raise_refusal(payload, "state")
    position = _decoded(_positions, payload, "state answer")
    if None in (position.sequence, position.pages, position.digest):
        raise UndecodableError("the engine's state names no pages: start it with --kv-events-config")
    return _decoded(_states, payload, "state answer")


def decode_chunk(payload: bytes) -> SnapshotChunk:
    """Raises: UndecodableError, also for what the engine says in place of a chunk."""
    _raise_refusal(payload, "snapshot")
    return _decoded(_chunks, payload, "snapshot chunk")


def _raise_refusal(payload: bytes, what: str) -> None:
    refusal = _decoded(_refusals, payload, f"{what} answer")
    if refusal.error is not None:
        raise UndecodableError(f"the engine does not tell its {what}: {refusal.error}")


def _decoded(decoder: msgspec.msgpack.Decoder[T], payload: bytes, what: str) -> T:
    try:
        return decoder.decode(payload)
    except msgspec.DecodeError as error:
        raise UndecodableError(f"{what} of {len(payload)} bytes: {error}") from error
