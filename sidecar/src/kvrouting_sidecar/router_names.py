"""Where the routers are: a name and port, and the addresses behind it at the moment."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass


class ResolutionError(Exception):
    """The name could not be looked up; it says nothing about the routers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterName:
    """A name that stands for all routers of a pool, and their port."""

    host: str
    port: int

    def __post_init__(self) -> None:
        if not self.host:
            raise ValueError("a router's host is empty: write it as host:port, for example routers.pool.svc:9090")
        if "/" in self.host or any(character.isspace() for character in self.host):
            raise ValueError(f"router host {self.host!r} must be a name or an address, without scheme and path")
        if not 1 <= self.port <= 65535:
            raise ValueError(f"router port {self.port} is outside 1..65535")


@dataclass(frozen=True, order=True, slots=True)
class RouterAddress:
    """One router. name: under which it was found."""

    host: str
    port: int
    name: str

    @property
    def target(self) -> str:
        """As gRPC dials it."""
        return f"ipv6:[{self.host}]:{self.port}" if ":" in self.host else f"ipv4:{self.host}:{self.port}"

    @property
    def label(self) -> str:
        """For logs and metrics."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


Resolver = Callable[[RouterName], Awaitable[frozenset[str]]]
"""The IP addresses of a name. Raises: ResolutionError."""


def parse_router_name(text: str) -> RouterName:
    """`host:port`, `[v6]:port`. Raises: ValueError that shows the form."""
    host, separator, port = text.rpartition(":")
    if not separator or not port.isdigit():
        raise ValueError(f"router {text!r} must be host:port, for example routers.pool.svc:9090")
    return RouterName(host=host.removeprefix("[").removesuffix("]"), port=int(port))


async def resolve(name: RouterName) -> frozenset[str]:
    """By the system's resolver, in a thread, so that a slow name server holds up nothing."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(name.host, name.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ResolutionError(f"{name.host}: {error}") from error
    return frozenset(str(address[0]) for *_, address in found)
