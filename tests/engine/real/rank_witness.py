"""A plug-in for SGLang beside ours: lets every tensor-parallel rank tell what its tree holds.

Ours speaks for the first rank alone, because all ranks hold the same; a test of that must hear the others.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

BACKEND = "rlt-witnessed"
WITNESS_PORT = "WITNESS_PORT"
"""Environment variable: where rank 0 tells; rank r one port further on each."""


def register() -> None:
    """Called by SGLang in each of its processes."""
    from sglang.srt.mem_cache.registry import register_radix_cache_backend

    register_radix_cache_backend(BACKEND, _build)


def _build(context: Any) -> Any:
    from sglang.srt.runtime_context import get_parallel

    from kvrouting_sglang.backend import build_cache
    from kvrouting_sglang.state_server import StateServer

    cache = build_cache(context)

    def tree() -> Iterator[Mapping[str, Any]]:
        yield told(cache)

    port = int(os.environ[WITNESS_PORT]) + get_parallel().attn_tp_rank
    StateServer(f"tcp://127.0.0.1:{port}", {"tree": tree}).start()
    return cache


def told(cache: Any) -> dict[str, Any]:
    """The real tree, node by node from its root, and the policy's counts; nothing may run meanwhile."""
    tree = cache.tree_core
    digest = tokens = 0
    pending = [(node, b"") for node in cache.root_node.children.values()]
    while pending:
        node, above = pending.pop()
        path = above + node.key.token_ids[: len(node.key)].tobytes()
        digest += int.from_bytes(hashlib.blake2b(path, digest_size=8).digest(), "big")
        tokens += len(node.key)
        pending.extend((child, path) for child in node.children.values())
    return {
        "tokens": tokens,
        "digest": digest % 2**64,
        "free_slots": cache.token_to_kv_pool_allocator.available_size(),
        "evicted_tokens": tree.evicted_tokens,
        **_figures(tree.policy),
    }


def _figures(policy: Any) -> dict[str, Any]:
    from kvrouting_core.eviction import GuardedEviction

    if isinstance(policy, GuardedEviction):
        return dict(policy.figures())
    return {"phase": policy.phase, "marked_pages": policy.marked_pages}
