"""How the plug-in gets into SGLang: what it loads, what it refuses, and that ranks decide alike."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.mem_cache.cache_init_params import CacheInitParams

from kvrouting_sglang.support import UnsupportedSetupError, refuse_unsupported
from tests.engine.real.caches import parameters

pytestmark = pytest.mark.timeout(1200)  # each interpreter loads SGLang anew


def run_python(code: str, **environment: str) -> Any:
    """What a fresh interpreter prints as its last line, from JSON."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_registration_loads_nothing_but_the_plugin() -> None:
    loaded = run_python(
        "import json, sys; import sglang.srt.mem_cache.registry; before = set(sys.modules)\n"
        "from kvrouting_sglang.plugin import register; register()\n"
        "from sglang.srt.mem_cache.registry import registered_radix_cache_backends as names; assert 'rlt' in names()\n"
        "print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    assert loaded == ["kvrouting_sglang", "kvrouting_sglang.plugin"]


def test_the_cache_loads_core_the_plugin_and_what_sglang_brings() -> None:
    """No package that SGLang's scheduler has not loaded itself."""
    loaded = run_python(
        "import json, sys; import sglang.srt.managers.scheduler; before = set(sys.modules)\n"
        "import kvrouting_sglang.backend\n"
        "print(json.dumps(sorted(set(sys.modules) - before)))",
    )
    outside = [
        name
        for name in loaded
        if name.split(".")[0] not in {"kvrouting_core", "kvrouting_sglang", "sglang", *sys.stdlib_module_names}
    ]
    assert outside == []
    assert not [
        name
        for name in loaded
        if name.startswith("kvrouting_core.")
        and "eviction" not in name
        and name not in {"kvrouting_core.radix_tree", "kvrouting_core.radix_changes"}
    ]


def test_sglang_finds_the_plugin_by_its_entry_point() -> None:
    names = run_python(
        "import json; from sglang.srt.plugins import load_plugins; load_plugins()\n"
        "from sglang.srt.mem_cache.registry import registered_radix_cache_backends as names\n"
        "print(json.dumps(names()))"
    )
    assert "rlt" in names


def test_another_version_of_sglang_is_refused_by_both_numbers() -> None:
    message = run_python(
        "import json, importlib.metadata as m; real = m.version\n"
        "m.version = lambda name: '0.6.1' if name == 'sglang' else real(name)\n"
        "from kvrouting_sglang.plugin import register; register()\n"
        "from sglang.srt.mem_cache.registry import get_radix_cache_factory\n"
        "try:\n    get_radix_cache_factory('rlt')(None)\n"
        "except RuntimeError as error:\n    print(json.dumps(str(error)))"
    )
    assert "0.5.23" in message
    assert "0.6.1" in message


VICTIMS = """
import json, random
from tests.engine.real.caches import policy_cache, serve
cache = policy_cache(capacity=500, page_size=1, seed=3)
rng = random.Random(0)
prompts = [[rng.randrange(900) for _ in range(80)] for _ in range(12)]
removed = []
for _ in range(150):
    serve(cache, prompts[rng.randrange(12)][: rng.randrange(1, 81)])
    gone = [event for event in cache.take_events() if type(event).__name__ == "BlockRemoved"]
    removed += [page for event in gone for page in event.block_hashes]
print(json.dumps(removed))
"""


def test_ranks_evict_alike_whatever_their_hash_seed() -> None:
    one = run_python(VICTIMS, PYTHONHASHSEED="1")
    other = run_python(VICTIMS, PYTHONHASHSEED="31337")
    assert len(one) > 1000
    assert one == other


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
