"""An engine whose state socket answers but which was started without KV events: it hashes no pages."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from aiohttp import web

from kvrouting_sidecar.settings import EndpointOverrides
from kvrouting_sidecar.sidecar import Sidecar
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


class _StockEngine(FakeEngine):
    """Says of itself what SGLang does without the plug-in."""

    async def _server_info(self, request: web.Request) -> web.Response:
        body = json.loads((await super()._server_info(request)).text or "")
        return web.json_response({**body, "radix_cache_backend": None, "radix_eviction_policy": "lru"})


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
            wanted = "--kv-events-config, so that rlt is at work is not proven"
            await eventually(lambda: _why_unproven(sidecar).endswith(wanted))


async def test_a_stock_engine_is_called_what_it_is() -> None:
    async with _StockEngine(state_socket=False) as engine, running_sidecar(engine, require_eviction="rlt") as sidecar:
        await eventually(lambda: _why_unproven(sidecar).endswith("not proven (it was started with 'lru')"))


def _why_unproven(sidecar: Sidecar) -> str:
    return {check.name: check.reason for check in sidecar.readiness()}["eviction_policy_live"]
