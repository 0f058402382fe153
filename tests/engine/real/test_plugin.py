"""How the plug-in gets into SGLang: what it loads, what it refuses, and that ranks decide alike."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.mem_cache.cache_init_params import CacheInitParams

from kvrouting_sglang.support import UnsupportedSetupError, refuse_unsupported
from tests.engine.real.caches import parameters
from tests.engine.real.conftest import Interpreters

pytestmark = pytest.mark.timeout(1200)  # each interpreter loads SGLang anew


@pytest.fixture
def loaded(starting_interpreters: Interpreters) -> Any:
    return starting_interpreters.loaded.result()


def test_registration_loads_nothing_but_the_plugin(loaded: Any) -> None:
    assert "rlt" in loaded["names"]
    assert loaded["registered"] == ["kvrouting_sglang", "kvrouting_sglang.plugin"]


def test_the_cache_loads_core_the_plugin_and_what_sglang_brings(loaded: Any) -> None:
    """No package that SGLang's scheduler has not loaded itself."""
    assert "kvrouting_sglang.backend" in loaded["cache"]
    outside = [
        name
        for name in loaded["cache"]
        if name.split(".")[0] not in {"kvrouting_core", "kvrouting_sglang", "sglang", *sys.stdlib_module_names}
    ]
    assert outside == []
    assert not [
        name
        for name in loaded["cache"]
        if name.startswith("kvrouting_core.")
        and "eviction" not in name
        and name not in {"kvrouting_core.radix_tree", "kvrouting_core.radix_changes"}
    ]


def test_sglang_finds_the_plugin_by_its_entry_point(starting_interpreters: Interpreters) -> None:
    assert "rlt" in starting_interpreters.found_by_another_version.result()["names"]


def test_another_version_of_sglang_is_refused_by_both_numbers(starting_interpreters: Interpreters) -> None:
    message = starting_interpreters.found_by_another_version.result()["refusal"]
    assert "0.5.23" in message
    assert "0.6.1" in message


@pytest.mark.parametrize(
    ("config", "port"),
    [
        ({"publisher": "zmq", "endpoint": "tcp://127.0.0.1:5557"}, 5560),
        ({"publisher": "zmq", "endpoint": "tcp://[::1]:5557"}, 5560),
        ({"publisher": "zmq"}, 5560),
        ({"publisher": "zmq", "endpoint": "inproc://events"}, None),
        ({"endpoint": "tcp://127.0.0.1:5557"}, None),
        (None, None),
    ],
)
def test_each_rank_names_the_port_of_its_own_events(config: Any, port: int | None) -> None:
    from kvrouting_sglang.backend import events_port

    assert events_port(None if config is None else json.dumps(config), 3) == port


def context_of(params: CacheInitParams, **changes: Any) -> Any:
    given = {
        "params": params,
        "server_args": SimpleNamespace(),
        "is_hybrid_swa": False,
        "is_hybrid_ssm": False,
        "enable_hierarchical_cache": False,
        "disable_radix_cache": False,
    }
    return SimpleNamespace(**{**given, **changes})


PLAIN = parameters(capacity=64, page_size=1)


def with_args(**args: Any) -> Any:
    return context_of(PLAIN, server_args=SimpleNamespace(**args))


def test_a_plain_setup_is_supported() -> None:
    refuse_unsupported(context_of(PLAIN))
    refuse_unsupported(with_args(nnodes=1))


@pytest.mark.parametrize(
    ("context", "named"),
    [
        (context_of(PLAIN, enable_hierarchical_cache=True), "--enable-hierarchical-cache"),
        (context_of(PLAIN, disable_radix_cache=True), "--disable-radix-cache"),
        (context_of(PLAIN, is_hybrid_swa=True), "sliding-window"),
        (context_of(PLAIN, is_hybrid_ssm=True), "state-space"),
        (context_of(replace(PLAIN, is_eagle=True)), "EAGLE"),
        (context_of(replace(PLAIN, eviction_policy="lfu")), "KVROUTING_ENGINE_POLICY"),
        (context_of(replace(PLAIN, pp_size=2)), "--pp-size 2"),
        (context_of(replace(PLAIN, attn_cp_size=2)), "--attn-cp-size 2"),
        (context_of(replace(PLAIN, enable_session_radix_cache=True)), "--enable-session-radix-cache"),
        (with_args(nnodes=2), r"several nodes \(--nnodes 2"),
        (with_args(dcp_size=2), "--dcp-size"),
        (with_args(enable_dp_attention=True), "--enable-dp-attention"),
        (with_args(enable_lmcache=True), "--enable-lmcache"),
        (with_args(enable_flexkv=True), "--enable-flexkv"),
        (with_args(enable_unified_cache_external_linker=True), "--enable-unified-cache-external-linker"),
        (with_args(enable_streaming_session=True), "--enable-streaming-session"),
        (with_args(disaggregation_mode="prefill"), "disaggregated"),
    ],
)
def test_what_is_unsupported_is_named(context: Any, named: str) -> None:
    with pytest.raises(UnsupportedSetupError, match=named):
        refuse_unsupported(context)
