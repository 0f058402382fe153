"""One data-parallel rank of the engine as the sidecar sees it: what it says of itself to routers and to operators."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvrouting_core.deltas import Delta
from kvrouting_core.identity import WorkerIdentity
from kvrouting_sidecar.engine_info import EngineInfo
from kvrouting_sidecar.event_reader import LatestLoad, Published
from kvrouting_sidecar.mirror_terms import MirrorListener, Source
from kvrouting_sidecar.rank_follower import RankFollower
from kvrouting_sidecar.rank_mirror import RankMirror
from kvrouting_sidecar.wire_events import LoadStat, UndecodableError, decode_load

_NO_EVENTS = "the engine publishes no KV events (start it with --kv-events-config)"


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerFacts:
    """What the operator of the worker decides, and the routers must know. required_eviction: empty: none is."""

    identity: WorkerIdentity
    model: str
    block_size_tokens: int
    hash_key_id: str
    tokenizer_fingerprint: str
    gpu_class: str
    http_endpoint: str
    required_eviction: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadReport:
    """The newest load and its age."""

    stat: LoadStat
    age_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Vitals:
    """What a heartbeat says beside the view."""

    source: Source
    load: LoadReport | None
    engine_healthy: bool
    events_flowing: bool
    eviction_policy: str
    eviction_live: bool
    cached_tokens: int
    verified: bool
    reason: str


class Listeners:
    """Passes the mirror's changes on to all that listen."""

    def __init__(self) -> None:
        self._members: dict[MirrorListener, None] = {}

    def add(self, listener: MirrorListener) -> None:
        self._members[listener] = None

    def remove(self, listener: MirrorListener) -> None:
        self._members.pop(listener, None)

    def changed(self, deltas: list[Delta]) -> None:
        for member in self._members:
            member.changed(deltas)

    def replaced(self) -> None:
        for member in self._members:
            member.replaced()

    def new_epoch(self) -> None:
        for member in self._members:
            member.new_epoch()


class Rank:
    """One worker. follower, published: None for an engine without events, whose routers guess from their decisions."""

    def __init__(
        self,
        *,
        facts: WorkerFacts,
        engine: EngineInfo,
        mirror: RankMirror,
        listeners: Listeners,
        follower: RankFollower | None,
        published: Published | None,
        engine_is_healthy: Callable[[], bool],
        clock_s: Callable[[], float],
    ) -> None:
        self.facts = facts
        self.engine = engine
        self.mirror = mirror
        self.listeners = listeners
        self.follower = follower
        self.published = published
        self._engine_is_healthy = engine_is_healthy
        self._clock_s = clock_s

    @property
    def source(self) -> Source:
        """How far the routers may trust what they are told."""
        return Source.APPROXIMATE if self.follower is None else self.mirror.source

    @property
    def capacity_tokens(self) -> int:
        """What the engine's cache can hold; 0: it does not say."""
        state = self.follower.latest_state if self.follower else None
        return (state.capacity_tokens if state else 0) or self.engine.capacity_tokens

    def load(self) -> LoadReport | None:
        """The newest report; None: none came, or it cannot be read."""
        latest: LatestLoad | None = self.published.load if self.published else None
        if latest is None or not latest.payload:
            return None
        try:
            stat = decode_load(latest.payload)
        except UndecodableError:
            return None
        return LoadReport(stat=stat, age_s=max(0.0, self._clock_s() - latest.received_s))

    def why_events_do_not_flow(self) -> str:
        """Empty if they do: subscribed, and the stream's position is known."""
        if self.follower is None or self.published is None:
            return _NO_EVENTS
        if not self.published.connected:
            return f"not connected to the engine's events at {self.published.events_endpoint}"
        if self.mirror.epoch is None:
            return "the engine has not said which process it is"
        state = self.follower.latest_state
        if state is not None and state.sequence <= (self.mirror.next_sequence or 0):
            return ""
        if self.mirror.next_sequence is not None or self.follower.replay_answered:
            return ""
        return "subscribed, but no event has come and the engine has no replay socket that says there was none"

    def why_eviction_is_not_proven(self, required: str) -> str:
        """Empty if the engine itself reports the required policy at work."""
        if self.follower is None:
            return f"{_NO_EVENTS}; without them the sidecar cannot follow it and prove that {required} is at work"
        state = self.follower.latest_state
        if state is None:
            started_with = self.engine.eviction_policy
            told = f" (it was started with {started_with!r})" if started_with not in ("", required) else ""
            return f"{self.mirror.state_trouble}, so that {required} is at work is not proven{told}"
        if state.eviction.policy != required:
            return f"the engine runs {state.eviction.policy!r}, not {required!r}"
        return "" if state.eviction.live else f"the engine reports {required} as not live"

    def why_not_in_sync(self) -> str:
        """Empty if the mirror may be shown."""
        if self.follower is None or self.mirror.in_sync:
            return ""
        return self.mirror.reason() or "the mirror is not in sync"

    def vitals(self) -> Vitals:
        """As of now."""
        state = self.follower.latest_state if self.follower else None
        healthy, flow = self._engine_is_healthy(), self.why_events_do_not_flow()
        reasons = ["" if healthy else "the engine's health page does not answer 200", flow]
        reasons.append(self.mirror.reason() if self.follower else "")
        return Vitals(
            source=self.source,
            load=self.load(),
            engine_healthy=healthy,
            events_flowing=not flow,
            eviction_policy=(state.eviction.policy if state else "") or self.engine.eviction_policy,
            eviction_live=bool(state and state.eviction.live),
            cached_tokens=self.mirror.pages * self.engine.page_size_tokens,
            verified=self.source is Source.EXACT and self.mirror.verification.held,
            reason="; ".join(reason for reason in reasons if reason),
        )
