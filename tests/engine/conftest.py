"""The tests in `real/` need SGLang, which has an environment of its own: `make test-engine`."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore_glob = ["cpu_stubs/*"] if find_spec("sglang") else ["cpu_stubs/*", "real/*"]
