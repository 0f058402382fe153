"""The router's settings as values, checked where they are made."""

from __future__ import annotations

from dataclasses import dataclass, field, fields


def _positive(value: object, name: str) -> None:
    if isinstance(value, (int, float)) and not value > 0:
        raise ValueError(f"{name} must be positive, got {value}")


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeLimits:
    """How long each part of a request may take, in seconds.

    first_byte_s: until the first event of a stream, counted from the attempt's start.
    idle_s: between two pieces of a stream.
    total_s: from the request's arrival to its end, waiting and retries included.
    client_read_s: for a client to send its headers, and again its body.
    client_write_s: for a client to take one piece of the answer.
    """

    connect_s: float = 2.0
    first_byte_s: float = 300.0
    idle_s: float = 120.0
    total_s: float = 1800.0
    client_read_s: float = 30.0
    client_write_s: float = 60.0
    shutdown_s: float = 30.0
    pick_s: float = 600.0

    def __post_init__(self) -> None:
        for f in fields(self):
            _positive(getattr(self, f.name), f.name)


@dataclass(frozen=True, kw_only=True, slots=True)
class SizeLimits:
    """How large a request may be, in bytes; decision_header_bytes bounds our own response header.

    max_sequences: answers to one request, prompts times n; an engine makes a request of its own of each.
    """

    max_body_bytes: int = 32 * 1024 * 1024
    max_header_bytes: int = 16 * 1024
    max_sequences: int = 4096
    decision_header_bytes: int = 4096

    def __post_init__(self) -> None:
        _positive(self.max_body_bytes, "max_body_bytes")
        _positive(self.max_sequences, "max_sequences")
        if self.max_header_bytes < 1024:
            raise ValueError(f"max_header_bytes must be at least 1024, got {self.max_header_bytes}")
        if self.decision_header_bytes < 256:
            raise ValueError(f"decision_header_bytes must be at least 256, got {self.decision_header_bytes}")


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncOptions:
    """The sync with the sidecars.

    window_messages: what a sidecar may send without an acknowledgement.
    silence_s: without a word from the sidecar a worker becomes suspect; gone_s: and then it is gone.
    slice_blocks: how much of a message is applied before other work gets its turn.
    """

    window_messages: int = 64
    heartbeat_interval_s: float = 1.0
    silence_s: float = 10.0
    gone_s: float = 60.0
    slice_blocks: int = 8192

    def __post_init__(self) -> None:
        for f in fields(self):
            _positive(getattr(self, f.name), f.name)
        if self.gone_s <= self.silence_s:
            raise ValueError(f"gone_s {self.gone_s} must exceed silence_s {self.silence_s}")
        if self.silence_s <= self.heartbeat_interval_s:
            raise ValueError(f"silence_s {self.silence_s} must exceed heartbeat_interval_s {self.heartbeat_interval_s}")


@dataclass(frozen=True, kw_only=True, slots=True)
class BreakerOptions:
    """When failed attempts make a worker suspect.

    failures: in a row. probe_s: pause before the first probe; it doubles up to max_probe_s while probes fail.
    """

    failures: int = 3
    probe_s: float = 1.0
    max_probe_s: float = 30.0

    def __post_init__(self) -> None:
        for f in fields(self):
            _positive(getattr(self, f.name), f.name)
        if self.max_probe_s < self.probe_s:
            raise ValueError(f"max_probe_s {self.max_probe_s} must be at least probe_s {self.probe_s}")


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutingOptions:
    """How decisions are made, kept and checked.

    max_attempts: workers tried for one request. audit_every: one decision in so many is audited; 0: none.
    prefix_credit_s: the index gets so long after the first token to show the prefix before its in-flight credit ends.
    kept_decisions: shown by the debug page.
    """

    max_attempts: int = 3
    audit_every: int = 100
    prefix_credit_s: float = 1.0
    kept_decisions: int = 200

    def __post_init__(self) -> None:
        _positive(self.max_attempts, "max_attempts")
        _positive(self.prefix_credit_s, "prefix_credit_s")
        if self.audit_every < 0:
            raise ValueError(f"audit_every must not be negative, got {self.audit_every}")
        if self.kept_decisions < 1:
            raise ValueError(f"kept_decisions must be at least 1, got {self.kept_decisions}")


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterOptions:
    """All limits together."""

    times: TimeLimits = field(default_factory=TimeLimits)
    sizes: SizeLimits = field(default_factory=SizeLimits)
    sync: SyncOptions = field(default_factory=SyncOptions)
    breaker: BreakerOptions = field(default_factory=BreakerOptions)
    routing: RoutingOptions = field(default_factory=RoutingOptions)
