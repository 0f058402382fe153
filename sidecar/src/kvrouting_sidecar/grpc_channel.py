"""How a router is reached: address, TLS and the timers that notice a dead peer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import grpc

from kvrouting_sidecar.router_names import RouterAddress

_OPTIONS: list[tuple[str, int | str]] = [
    # A peer that is gone without a farewell is noticed in seconds: unacknowledged heartbeats by TCP_USER_TIMEOUT, which
    # gRPC sets to the keepalive timeout, and silence by pings. The router must allow a ping every 10 s.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # Streams to the same router do not share fate, and a new stream means a new connection.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.enable_retries", 0),
]


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterCredentials:
    """What the sidecar shows and expects. ca: PEM, None: no TLS. join_token: None: the pool asks for none."""

    join_token: str | None = field(default=None, repr=False)
    ca: bytes | None = None
    certificate: bytes | None = None
    private_key: bytes | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.join_token == "":
            raise ValueError("the join token is empty: leave it out, or give one")
        if self.join_token is not None and not (self.join_token.isascii() and self.join_token.isprintable()):
            raise ValueError("the join token must be printable ASCII: it is sent in a header")
        if (self.certificate is None) != (self.private_key is None):
            raise ValueError("a client certificate and its private key are given together or not at all")
        if self.certificate is not None and self.ca is None:
            raise ValueError("a client certificate needs TLS: give the routers' CA too")
        for name, pem in (("CA", self.ca), ("certificate", self.certificate), ("private key", self.private_key)):
            if pem is not None and b"-----BEGIN " not in pem:
                raise ValueError(f"the file of the {name} holds no PEM")

    def metadata(self) -> Sequence[tuple[str, str]]:
        """Of every stream."""
        return [] if self.join_token is None else [("authorization", f"Bearer {self.join_token}")]


def open_channel(address: RouterAddress, credentials: RouterCredentials) -> grpc.aio.Channel:
    """A channel of its own; the name that was resolved is what the router's certificate must bear."""
    options = [*_OPTIONS, ("grpc.default_authority", f"{address.name}:{address.port}")]
    if credentials.ca is None:
        return grpc.aio.insecure_channel(address.target, options=options)
    tls = grpc.ssl_channel_credentials(credentials.ca, credentials.private_key, credentials.certificate)
    options.append(("grpc.ssl_target_name_override", address.name))
    return grpc.aio.secure_channel(address.target, tls, options=options)
