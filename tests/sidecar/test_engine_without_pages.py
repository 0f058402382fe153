"""An engine whose state socket answers but which was started without KV events: it hashes no pages."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvrouting_sidecar.settings import EndpointOverrides
from kvrouting_sidecar.wire_events import UndecodableError, decode_state
from tests.fakes.fake_engine import FakeEngine, FakeRank
from tests.fakes.running_sidecar import eventually, running_sidecar


class _RankWithoutPages(FakeRank):
    """Answers as SGLang with the plug-in does without `--kv-events-config`."""

    def _state_body(self) -> dict[str, Any]:
        body = super()._state_body()
        for name in ("sequence", "pages", "digest"):
            del body[name]
        return {**body, "events_port": None}


def test_the_reason_names_the_flag_and_not_a_field() -> None:
    body = {"version": 1, "end": True, "epoch": "e", "eviction": {"policy": "rlt", "live": True}}
    for position in ({}, {"sequence": None, "pages": None, "digest": None}, {"sequence": 3, "pages": 1}):
        with pytest.raises(UndecodableError, match="--kv-events-config"):
            decode_state(msgspec.msgpack.encode({**body, **position}))
    state = decode_state(msgspec.msgpack.encode({**body, "sequence": 3, "pages": 1, "digest": 2**64 - 1}))
    assert (state.sequence, state.pages, state.digest, state.events_port) == (3, 1, 2**64 - 1, None)


async def test_the_worker_is_not_ready_and_says_what_is_missing() -> None:
    """The sidecar was told where events are, though the engine publishes none."""
    engine = FakeEngine(events=False)
    engine.ranks = [_RankWithoutPages(engine, 0)]
    async with engine:
        told = EndpointOverrides(state=engine.state_endpoint, events=f"tcp://127.0.0.1:{engine.ports[0]}")
        async with running_sidecar(engine, endpoints=told, require_eviction="rlt") as sidecar:

            def reason() -> str:
                checks = {check.name: check.reason for check in sidecar.readiness()}
                return checks["eviction_policy_live"]

            await eventually(lambda: "--kv-events-config, so that rlt is at work is not proven" in reason())
