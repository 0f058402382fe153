"""What the engine says of itself, and what its bytes mean."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvrouting_sidecar.engine_endpoints import rank_endpoints
from kvrouting_sidecar.engine_info import EngineInfoError, parse_engine_info
from kvrouting_sidecar.settings import EndpointOverrides
from kvrouting_sidecar.wire_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    UndecodableError,
    decode_batch,
    decode_load,
)

_DESCRIPTION: dict[str, Any] = {
    "version": "0.5.23",
    "model_path": "/models/llama",
    "served_model_name": "llama",
    "page_size": 16,
    "dp_size": 2,
    "max_total_num_tokens": 5000,
    "radix_cache_backend": "rlt",
    "chunked_prefill_size": -1,
    "max_running_requests": None,
    "internal_states": [{"effective_max_running_requests_per_dp": 48}],
    "startup_time": {"load": 1.5},
    "kv_events": {
        "endpoint_port_base": 5557,
        "replay_endpoint_port_base": 5567,
        "load_endpoint_port_base": 5577,
        "topic": "kv-events",
    },
}


def test_a_description_is_read() -> None:
    info = parse_engine_info(_DESCRIPTION)
    assert (info.model, info.page_size_tokens, info.dp_size, info.capacity_tokens) == ("llama", 16, 2, 5000)
    assert info.eviction_policy == "", "the plug-in's name does not tell which policy it runs"
    assert info.scheduler.max_running_requests == 48
    assert info.scheduler.chunked_prefill_tokens == 0
    assert info.events is not None
    assert info.events.topic == "kv-events"


def test_another_start_has_another_fingerprint() -> None:
    first, same = parse_engine_info(_DESCRIPTION), parse_engine_info(dict(_DESCRIPTION))
    second = parse_engine_info(_DESCRIPTION | {"startup_time": {"load": 1.6}})
    assert first.start_fingerprint == same.start_fingerprint != second.start_fingerprint
    assert parse_engine_info(_DESCRIPTION | {"startup_time": None}).start_fingerprint is None


def test_a_plain_engine_has_no_events() -> None:
    info = parse_engine_info({"model_path": "m"})
    assert info.eviction_policy == "lru"
    assert info.events is None
    assert info.page_size_tokens == 1
    assert info.dp_size == 1


@pytest.mark.parametrize(
    ("field", "value"), [("page_size", 0), ("page_size", "16"), ("dp_size", 0), ("kv_events", 5), ("page_size", 128)]
)
def test_nonsense_is_named(field: str, value: object) -> None:
    with pytest.raises(EngineInfoError, match=field):
        parse_engine_info(_DESCRIPTION | {field: value})


def test_a_rank_adds_its_number_to_each_port_and_an_override_counts_more() -> None:
    info = parse_engine_info(_DESCRIPTION)
    overrides = EndpointOverrides(load="tcp://10.0.0.9:7000", state="tcp://127.0.0.1:5579")
    places = rank_endpoints(info, overrides, host="10.0.0.1", rank=1)
    assert places.events == "tcp://10.0.0.1:5558"
    assert places.replay == "tcp://10.0.0.1:5568"
    assert places.load == "tcp://10.0.0.9:7001"
    assert places.state == "tcp://127.0.0.1:5580"
    bare = rank_endpoints(parse_engine_info({}), EndpointOverrides(state=None), host="h", rank=0)
    assert (bare.events, bare.replay, bare.load, bare.state) == (None, None, None, None)


def test_events_are_decoded_as_the_engine_writes_them() -> None:
    stored = {
        "type": "BlockStored", "block_hashes": [-5, 7], "parent_block_hash": None, "token_ids": [1, 2], "block_size": 1,
        "lora_id": 3, "session_id": "unknown fields are no harm",
    }  # fmt: skip
    batch = [1.5, [stored, {"type": "BlockRemoved", "block_hashes": [7]}, {"type": "AllBlocksCleared"}], 0]
    first, second, third = decode_batch(msgspec.msgpack.encode(batch)).events
    assert isinstance(first, BlockStored)
    assert isinstance(second, BlockRemoved)
    assert isinstance(third, AllBlocksCleared)
    assert first.block_hashes == [-5, 7]
    assert first.lora_adapter == "lora:3"


@pytest.mark.parametrize("payload", [b"\xc1", msgspec.msgpack.encode([1.0, [{"type": "BlockMoved"}]])])
def test_bytes_that_are_no_batch_are_refused(payload: bytes) -> None:
    with pytest.raises(UndecodableError, match="event batch"):
        decode_batch(payload)


def test_a_load_report_of_an_older_engine_lacks_the_last_fields() -> None:
    stat = decode_load(msgspec.msgpack.encode(["LoadStat", 1, 2, 300, 4000]))
    assert (stat.running_requests, stat.waiting_requests, stat.used_tokens, stat.max_total_tokens) == (1, 2, 300, 4000)
    assert stat.total_prefill_busy_us == 0
