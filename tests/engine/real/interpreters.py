"""What only a fresh interpreter can tell. Each of them loads SGLang anew, so that one tells as much as it can."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]

# What the plug-in loads: when SGLang registers it, and when a scheduler asks for its cache.
LOADED = """
import json, sys
import sglang.srt.mem_cache.registry as registry
before = set(sys.modules)
from kvrouting_sglang.plugin import register
register()
registered = sorted(set(sys.modules) - before)
names = list(registry.registered_radix_cache_backends())
import sglang.srt.managers.scheduler
before = set(sys.modules)
import kvrouting_sglang.backend
print(json.dumps({"registered": registered, "names": names, "cache": sorted(set(sys.modules) - before)}))
"""

# Nobody but SGLang calls the plug-in here, which takes SGLang for one that it does not know.
FOUND_BY_ANOTHER_VERSION = """
import importlib.metadata as metadata, json
real = metadata.version
metadata.version = lambda name: "0.6.1" if name == "sglang" else real(name)
from sglang.srt.plugins import load_plugins
load_plugins()
import sglang.srt.mem_cache.registry as registry
told = {"names": list(registry.registered_radix_cache_backends())}
try:
    registry.get_radix_cache_factory("rlt")(None)
except RuntimeError as error:
    told["refusal"] = str(error)
print(json.dumps(told))
"""

# One rank of an engine: all that it evicted, page by page, and what its tree holds at the end.
RANK = """
import json, random, sys
from tests.engine.real.caches import policy_cache, serve
from tests.engine.real.mirrors import digest, real_pages
told = {}
for policy in sys.argv[1:]:
    cache, rng, removed = policy_cache(capacity=4000, page_size=1, policy=policy, seed=3), random.Random(4), []
    heads = [[rng.randrange(5000) for _ in range(100)] for _ in range(60)]
    for _ in range(300):
        serve(cache, heads[int(rng.random() ** 2 * 60)] + [rng.randrange(5000) for _ in range(rng.randrange(100))])
        gone = [event for event in cache.take_events() if type(event).__name__ == "BlockRemoved"]
        removed += [page for event in gone for page in event.block_hashes]
    told[policy] = {
        "removed": removed, "digest": digest(real_pages(cache)), "evicted_tokens": cache.tree_core.evicted_tokens
    }
print(json.dumps(told))
"""


def run_python(code: str, *arguments: str, **environment: str) -> Any:
    """What a fresh interpreter prints as its last line, from JSON."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])
