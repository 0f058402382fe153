"""How a ZeroMQ socket dials an engine's endpoint."""

from __future__ import annotations

from typing import Any

import zmq


def dial(socket: zmq.Socket[Any], endpoint: str) -> None:
    """Connect, to an IPv6 address too.

    ZeroMQ knows those only where the option is on. With it on, it would look names up as IPv6 alone.
    """
    if "[" in endpoint:
        socket.setsockopt(zmq.IPV6, 1)
    socket.connect(endpoint)
