"""Builds the cache of one scheduler process: SGLang's factory for `--radix-cache-backend rlt`."""

from __future__ import annotations

import logging
import os
import random
import secrets
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from sglang.srt.disaggregation.kv_events import (
    KVEventsConfig,
    parse_advertisable_tcp,
    select_kv_publisher_dp_rank,
)
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.registry import create_unified_radix_cache
from sglang.srt.mem_cache.unified_cache.tree_core_registry import get_tree_core_factory, register_tree_core_backend
from sglang.srt.runtime_context import get_parallel

from kvrouting_core.eviction import make_policy
from kvrouting_sglang.cache import PolicyRadixCache
from kvrouting_sglang.engine_state import EngineState, RankIdentity
from kvrouting_sglang.pauses import Pauses
from kvrouting_sglang.settings import EngineSettings, endpoint_of_rank
from kvrouting_sglang.state_server import StateServer
from kvrouting_sglang.support import refuse_unsupported
from kvrouting_sglang.tree import PolicyInitParams, PolicyTreeCore
from kvrouting_sglang.tree_reader import TreeReader

logger = logging.getLogger(__name__)

TREE = "kvrouting"
"""Name of our tree in SGLang's registry of trees."""


def build_cache(context: Any) -> PolicyRadixCache:
    """The cache for one rank, with its state socket open where the rank has one.

    Raises: UnsupportedSetupError, ValueError, StateSocketError: each ends the server's start with the reason.
    """
    settings = EngineSettings.from_environment(os.environ)
    refuse_unsupported(context)
    parallel = get_parallel()
    dp_rank = select_kv_publisher_dp_rank(parallel.attn_dp_size, parallel.attn_dp_rank, parallel.dp_rank)
    seed = context.server_args.random_seed if settings.seed is None else settings.seed
    cache = policy_cache(context, policy=settings.policy, seed=seed, dp_rank=dp_rank)
    identity = RankIdentity(
        epoch=secrets.token_hex(8),
        dp_rank=dp_rank,
        events_port=events_port(context.server_args.kv_events_config, dp_rank),
        policy=settings.policy,
        seed=seed,
    )
    # Tensor-parallel ranks hold the same tree: the first one speaks for it, as with KV events.
    if settings.state_endpoint is not None and not (parallel.pp_rank or parallel.attn_tp_rank or parallel.attn_cp_rank):
        endpoint = endpoint_of_rank(settings.state_endpoint, dp_rank)
        StateServer(endpoint, state_operations(cache, identity)).start()
        logger.info("eviction policy %s, seed %s, state socket at %s", settings.policy, seed, endpoint)
    return cache


def events_port(kv_events_config: str | None, dp_rank: int) -> int | None:
    """Where a rank publishes its events, as `/server_info` advertises it; None: nowhere on TCP.

    kv_events_config: the value of `--kv-events-config`.
    """
    if not kv_events_config:
        return None
    config = KVEventsConfig.from_cli(kv_events_config)
    advertised = None if config.publisher == "null" else parse_advertisable_tcp(config.endpoint)
    return None if advertised is None else int(advertised[1]) + dp_rank


def policy_cache(context: Any, *, policy: str, seed: int, dp_rank: int) -> PolicyRadixCache:
    """SGLang's cache on our tree. Same policy, seed, rank and requests: same victims, whatever the hash seed."""
    params = policy_params(context.params, policy=policy, seed=seed, dp_rank=dp_rank)
    cache: PolicyRadixCache = create_unified_radix_cache(replace(context, params=params), cache_class=PolicyRadixCache)
    return cache


def policy_params(params: CacheInitParams, *, policy: str, seed: int, dp_rank: int) -> PolicyInitParams:
    """SGLang's parameters of a cache, with our tree and a fresh policy in it."""
    # A text seeds the generator by its digest, so that seed and rank both count and no hash seed does.
    coins = random.Random(f"{seed}:{dp_rank}")
    if get_tree_core_factory(TREE) is None:
        register_tree_core_backend(TREE, PolicyTreeCore)
    given = {each.name: getattr(params, each.name) for each in fields(params)}
    return PolicyInitParams(**{**given, "tree_core_backend": TREE, "policy": make_policy(policy, coins)})


def state_operations(cache: PolicyRadixCache, identity: RankIdentity) -> Mapping[str, Any]:
    """What the state socket answers."""
    state = EngineState(cache, identity=identity, reader=TreeReader(cache.tree_core, pauses=Pauses()))
    return {"state": state.state, "snapshot": state.snapshot}
