"""Where each rank of an engine publishes and answers."""

from __future__ import annotations

from dataclasses import dataclass

from kvrouting_sidecar.engine_info import EngineInfo
from kvrouting_sidecar.settings import EndpointOverrides, endpoint_of_rank


@dataclass(frozen=True, kw_only=True, slots=True)
class RankEndpoints:
    """One rank's sockets. None: the engine lacks it. events_port: as the engine itself says, whatever is overridden."""

    events: str | None
    replay: str | None
    load: str | None
    state: str | None
    topic: str
    events_port: int | None = None


def rank_endpoints(info: EngineInfo, overrides: EndpointOverrides, *, host: str, rank: int) -> RankEndpoints:
    """An override counts more than what the engine says of itself; host: where its ports are."""
    ports = info.events

    def place(override: str | None, port: int | None) -> str | None:
        base = override if override is not None else (f"tcp://{host}:{port}" if port else None)
        return None if base is None else endpoint_of_rank(base, rank)

    return RankEndpoints(
        events=place(overrides.events, ports.events if ports else None),
        replay=place(overrides.replay, ports.replay if ports else None),
        load=place(overrides.load, ports.load if ports else None),
        state=place(overrides.state, None),
        topic=ports.topic if ports else "",
        events_port=ports.events + rank if ports else None,
    )
