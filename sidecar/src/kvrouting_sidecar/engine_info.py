"""What an engine says of itself in `GET /server_info`: parsed once, at the edge."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

_PLUG_IN = "rlt"
"""The plug-in's name as SGLang's `--radix-cache-backend`, whichever policy it runs."""


class EngineInfoError(ValueError):
    """The engine's description lacks what a sidecar needs, or contradicts itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerOptions:
    """The engine's scheduler as the routers must know it; 0: not said."""

    max_running_requests: int = 0
    chunked_prefill_tokens: int = 0
    max_prefill_tokens: int = 0
    prefill_decode_interval: int = 0
    mixed_chunk: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class EventPorts:
    """Base ports of one engine; a rank adds its number. None: the engine does not publish it."""

    events: int
    replay: int | None
    load: int | None
    topic: str


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineInfo:
    """One engine process.

    eviction_policy: what it was told to run; empty with the plug-in, which tells it by its state socket alone.
    start_fingerprint: differs from start to start of a process and so
    tells a restart; None: the engine does not say. events: None if it publishes no KV events.
    """

    model: str
    version: str
    dp_size: int
    page_size_tokens: int
    capacity_tokens: int
    eviction_policy: str
    scheduler: SchedulerOptions
    events: EventPorts | None
    start_fingerprint: str | None

    def __post_init__(self) -> None:
        if not 1 <= self.page_size_tokens <= 64:
            raise EngineInfoError(f"page_size {self.page_size_tokens} is outside 1..64 tokens")
        if self.dp_size < 1:
            raise EngineInfoError(f"dp_size {self.dp_size} must be 1 or more")
        if self.capacity_tokens < 0:
            raise EngineInfoError(f"max_total_num_tokens {self.capacity_tokens} must be 0 or more")

    def without_events(self) -> EngineInfo:
        """The same engine as if it published no events."""
        return replace(self, events=None)


def parse_engine_info(body: Mapping[str, Any]) -> EngineInfo:
    """The engine behind a decoded `/server_info` answer.

    Raises: EngineInfoError naming the field that is missing or wrong.
    """
    kv_events = _mapping(body, "kv_events")
    page_size = _integer(body, "page_size", _integer(kv_events, "block_size", 1))
    return EngineInfo(
        model=str(body.get("served_model_name") or body.get("model_path") or ""),
        version=str(body.get("version") or ""),
        dp_size=_integer(body, "dp_size", _integer(kv_events, "dp_size", 1)),
        page_size_tokens=page_size,
        capacity_tokens=_integer(body, "max_total_num_tokens", 0),
        eviction_policy=_eviction_policy(body),
        scheduler=_scheduler(body),
        events=_event_ports(kv_events),
        start_fingerprint=_fingerprint(body.get("startup_time")),
    )


def _eviction_policy(body: Mapping[str, Any]) -> str:
    backend = str(body.get("radix_cache_backend") or "")
    if backend == _PLUG_IN:
        return ""
    return backend or str(body.get("radix_eviction_policy") or "lru")


def _scheduler(body: Mapping[str, Any]) -> SchedulerOptions:
    return SchedulerOptions(
        max_running_requests=_max_running_requests(body),
        # SGLang's -1 switches chunking off.
        chunked_prefill_tokens=max(0, _integer(body, "chunked_prefill_size", 0)),
        max_prefill_tokens=_integer(body, "max_prefill_tokens", 0),
        prefill_decode_interval=_integer(body, "prefill_decode_interval", 0),
        mixed_chunk=bool(body.get("enable_mixed_chunk")),
    )


def _max_running_requests(body: Mapping[str, Any]) -> int:
    """The option, or where it was left to the engine, what the engine chose."""
    said = _integer(body, "max_running_requests", 0)
    if said:
        return said
    states = body.get("internal_states")
    first = states[0] if isinstance(states, list) and states else None
    return _integer(first, "effective_max_running_requests_per_dp", 0) if isinstance(first, dict) else 0


def _event_ports(kv_events: Mapping[str, Any]) -> EventPorts | None:
    base = _integer(kv_events, "endpoint_port_base", 0)
    if not base:
        return None
    return EventPorts(
        events=base,
        replay=_integer(kv_events, "replay_endpoint_port_base", 0) or None,
        load=_integer(kv_events, "load_endpoint_port_base", 0) or None,
        topic=str(kv_events.get("topic") or ""),
    )


def _fingerprint(startup_time: object) -> str | None:
    """A hash of the measured durations of the engine's start: a weak epoch."""
    if not startup_time:
        return None
    text = json.dumps(startup_time, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _mapping(body: Mapping[str, Any], field: str) -> Mapping[str, Any]:
    value = body.get(field)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise EngineInfoError(f"/server_info: {field} is {value!r}, not a map")
    return value


def _integer(body: Mapping[str, Any], field: str, default: int) -> int:
    value = body.get(field)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int):
        raise EngineInfoError(f"/server_info: {field} is {value!r}, not an integer")
    return value
