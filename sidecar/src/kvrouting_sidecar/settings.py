"""What a sidecar is told by its operator, checked."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from kvrouting_core.blocks import routing_block_size
from kvrouting_core.identity import WorkerIdentity
from kvrouting_sidecar.engine_http import EngineTimes
from kvrouting_sidecar.grpc_channel import RouterCredentials
from kvrouting_sidecar.grpc_conversation import StreamTimes
from kvrouting_sidecar.rank_follower import FollowerTimes
from kvrouting_sidecar.router_names import RouterName

_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")


@dataclass(frozen=True, kw_only=True, slots=True)
class DrainSettings:
    """Who may drain, and for how long it waits. token: None: nobody may."""

    header: str = "x-kvrouting-drain-token"
    token: str | None = field(default=None, repr=False)
    limit_s: float = 300.0

    def __post_init__(self) -> None:
        if not self.header:
            raise ValueError("the drain header's name is empty")
        if not _HEADER_NAME.fullmatch(self.header):
            raise ValueError(f"{self.header!r} cannot be the name of a header: use letters, digits and dashes")
        if self.token == "":
            raise ValueError("the drain token is empty: leave it out, or give one")
        if not 0 < self.limit_s < math.inf:
            raise ValueError(f"drain limit {self.limit_s} s must be above 0 and finite")


@dataclass(frozen=True, kw_only=True, slots=True)
class EndpointOverrides:
    """ZeroMQ endpoints of rank 0, where they are not to be taken from the engine's own description."""

    events: str | None = None
    replay: str | None = None
    load: str | None = None
    state: str | None = "tcp://127.0.0.1:5579"

    def __post_init__(self) -> None:
        for name in ("events", "replay", "load", "state"):
            endpoint = getattr(self, name)
            if endpoint is not None:
                check_endpoint(endpoint)


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """One sidecar of one engine. model: empty: the name under which the engine serves it."""

    pool: str
    pod_uid: str
    engine_url: str
    advertise_endpoint: str
    hash_key: bytes = field(repr=False)
    routers: tuple[RouterName, ...]
    block_size_tokens: int = 64
    model: str = ""
    gpu_class: str = ""
    tokenizer_fingerprint: str = ""
    require_eviction: str | None = None
    endpoints: EndpointOverrides = field(default_factory=EndpointOverrides)
    queue_bytes: int = 256 << 20
    look_up_every_s: float = 5.0
    engine_times: EngineTimes = field(default_factory=EngineTimes)
    drain: DrainSettings = field(default_factory=DrainSettings)
    credentials: RouterCredentials = field(default_factory=RouterCredentials)
    stream_times: StreamTimes = field(default_factory=StreamTimes)
    follower_times: FollowerTimes = field(default_factory=FollowerTimes)
    http_host: str = "0.0.0.0"  # noqa: S104  (the kubelet and the metrics collector come from outside the pod)
    http_port: int = 9400

    def __post_init__(self) -> None:
        routing_block_size(self.block_size_tokens)
        WorkerIdentity(pool=self.pool, pod_uid=self.pod_uid, dp_rank=0)
        if not 16 <= len(self.hash_key) <= 64:
            raise ValueError(f"the hash key has {len(self.hash_key)} bytes, not 16..64: give 32..128 hex digits")
        for name, url in (("engine URL", self.engine_url), ("advertised endpoint", self.advertise_endpoint)):
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname or not _has_valid_port(url):
                raise ValueError(f"{name} {url!r} must be http://host:port")
        if self.queue_bytes < 1 << 20:
            raise ValueError(f"queue of {self.queue_bytes} bytes is less than 1 MiB: one large batch would not fit")
        if not 0 < self.look_up_every_s < math.inf:
            raise ValueError(f"look-up interval {self.look_up_every_s} s must be above 0 and finite")
        if not 0 <= self.http_port <= 65535:
            raise ValueError(f"HTTP port {self.http_port} is outside 0..65535")

    @property
    def engine_host(self) -> str:
        """Where the engine's sockets are."""
        host = urlsplit(self.engine_url).hostname or ""
        return f"[{host}]" if ":" in host else host


def check_endpoint(endpoint: str) -> None:
    """Raises: ValueError unless it is tcp://host:port."""
    parts = urlsplit(endpoint)
    if parts.scheme != "tcp" or not parts.hostname or not _has_valid_port(endpoint) or not parts.port:
        raise ValueError(f"endpoint {endpoint!r} must be tcp://host:port, for example tcp://127.0.0.1:5557")


def _has_valid_port(url: str) -> bool:
    """Whether the port is left out or within 1..65535."""
    try:
        return urlsplit(url).port != 0
    except ValueError:
        return False


def endpoint_of_rank(endpoint: str, rank: int) -> str:
    """A rank's endpoint: its port is the base port plus its number."""
    base, _, port = endpoint.rpartition(":")
    return f"{base}:{int(port) + rank}"
