"""What of SGLang the plug-in does not support, found when the server starts."""

from __future__ import annotations

from typing import Any

from kvrouting_sglang import BACKEND


class UnsupportedSetupError(ValueError):
    """The server is set up in a way that the plug-in does not support."""


def refuse_unsupported(context: Any) -> None:
    """Raises: UnsupportedSetupError, naming everything in this setup that does not go with the plug-in."""
    found = [reason for present, reason in _checks(context) if present]
    if found:
        raise UnsupportedSetupError(
            f"--radix-cache-backend {BACKEND} does not support: {'; '.join(found)}. Change this, or leave the flag out."
        )


def _checks(context: Any) -> list[tuple[bool, str]]:
    params, args = context.params, context.server_args
    # SGLang draws the seed in each node's launcher: tensor-parallel ranks of two nodes would evict differently.
    nodes = getattr(args, "nnodes", 1)
    return [
        (context.disable_radix_cache, "a disabled radix cache (--disable-radix-cache)"),
        (context.enable_hierarchical_cache, "a hierarchical cache (--enable-hierarchical-cache)"),
        (context.is_hybrid_swa, "models with sliding-window attention beside full attention"),
        (context.is_hybrid_ssm, "models with state-space layers"),
        (params.is_eagle, "speculative decoding with EAGLE (its cache keys are pairs of tokens)"),
        (params.enable_session_radix_cache, "--enable-session-radix-cache"),
        (
            params.eviction_policy.lower() != "lru",
            f"--radix-eviction-policy {params.eviction_policy} (set KVROUTING_ENGINE_POLICY instead)",
        ),
        (params.pp_size > 1, f"pipeline parallelism (--pp-size {params.pp_size})"),
        (params.attn_cp_size > 1, f"context parallelism (--attn-cp-size {params.attn_cp_size})"),
        (nodes > 1, f"several nodes (--nnodes {nodes}: each would draw coins of its own)"),
        (getattr(args, "dcp_size", 1) > 1, "decode context parallelism (--dcp-size)"),
        (bool(getattr(args, "enable_dp_attention", False)), "data-parallel attention (--enable-dp-attention)"),
        (bool(getattr(args, "enable_lmcache", False)), "LMCache (--enable-lmcache)"),
        (bool(getattr(args, "enable_flexkv", False)), "FlexKV (--enable-flexkv)"),
        (
            bool(getattr(args, "enable_unified_cache_external_linker", False)),
            "an external cache linker (--enable-unified-cache-external-linker)",
        ),
        (getattr(args, "disaggregation_mode", "null") not in (None, "null"), "disaggregated prefill and decode"),
        (bool(getattr(args, "enable_streaming_session", False)), "--enable-streaming-session"),
    ]
