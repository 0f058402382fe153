"""Ports that are free now and that no outgoing connection will take while their process is away."""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Sequence

# Below the range from which systems give outgoing connections their ports: a killed process finds its port free again.
_LOWEST, _HIGHEST = 12_000, 30_000
_TRIES = 1000


class NoFreePortsError(RuntimeError):
    """Too few ports of the range are free."""


def free_ports(count: int, *, rng: random.Random) -> Sequence[int]:
    """Distinct ports of the loopback on which nobody listens. Raises: NoFreePortsError."""
    with contextlib.ExitStack() as held:
        found: list[int] = []
        for port in rng.sample(range(_LOWEST, _HIGHEST), _TRIES):
            if len(found) == count:
                break
            sock = held.enter_context(socket.socket())
            try:
                sock.bind(("127.0.0.1", port))
            except OSError:
                continue
            found.append(port)
    if len(found) < count:
        raise NoFreePortsError(f"only {len(found)} of {count} ports found free between {_LOWEST} and {_HIGHEST}")
    return found
