"""What the state socket says in place of an answer reaches who reads the sidecar's reasons."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from kvrouting_sidecar.wire_events import UndecodableError, decode_chunk, decode_state
from tests.fakes.fake_engine import FakeEngine, FakeRank
from tests.fakes.running_sidecar import eventually, running_sidecar

_REASON = "KeyError: 'node 7'"


@pytest.mark.parametrize("decode", [decode_state, decode_chunk])
def test_an_error_of_the_engine_is_the_reason(decode: Callable[[bytes], object]) -> None:
    with pytest.raises(UndecodableError, match=_REASON):
        decode(msgspec.msgpack.encode({"error": _REASON, "end": True}))


@pytest.mark.parametrize("decode", [decode_state, decode_chunk])
def test_an_answer_that_is_no_map_is_none(decode: Callable[[bytes], object]) -> None:
    with pytest.raises(UndecodableError, match="answer of 2 bytes"):
        decode(msgspec.msgpack.encode([1]))


def test_a_chunk_without_an_error_is_a_chunk() -> None:
    chunk = decode_chunk(msgspec.msgpack.encode({"epoch": "e", "position": 4, "events": [], "error": None}))
    assert (chunk.epoch, chunk.position, chunk.events, chunk.end) == ("e", 4, [], False)


class _FailingRank(FakeRank):
    """Fails at its state as the plug-in does when the reading raises."""

    def _state_body(self) -> dict[str, Any]:
        return {"error": _REASON, "end": True}


async def test_the_sidecar_says_why_the_policy_is_not_proven() -> None:
    engine = FakeEngine()
    engine.ranks = [_FailingRank(engine, 0)]
    async with engine, running_sidecar(engine, require_eviction="rlt") as sidecar:
        await eventually(lambda: any(_REASON in check.reason for check in sidecar.readiness()))
