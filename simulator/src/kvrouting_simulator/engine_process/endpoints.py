"""Binds the ports of an engine: one per data-parallel rank, base port + rank, with errors that name the option."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass

import zmq

# An ephemeral base needs its successors free as well; on a machine with few ports in use the first try fits.
_TRIES = 50


# What another port would help against; anything else is the host's fault.
_PORTS_FAULT = frozenset({errno.EADDRINUSE, errno.EACCES, errno.EPERM})


class ListenError(RuntimeError):
    """A place cannot be listened on; the message names it, the reason, and the option to change."""


class PortInUseError(ListenError):
    """Somebody listens there already."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PortRange:
    """Where a family of sockets goes. option, host_option: the command line's names for `base` and `host`.

    base 0: any free ports.
    """

    option: str
    host_option: str
    host: str
    base: int

    def __post_init__(self) -> None:
        if not 0 <= self.base <= 65535:
            raise ValueError(f"{self.option} must be a port 0..65535, got {self.base}")


@dataclass(frozen=True, kw_only=True, slots=True)
class BoundRange:
    """Bound sockets, one per rank: `sockets[r]` listens on port base + r."""

    host: str
    base: int
    sockets: Sequence[zmq.Socket[bytes]]


def bind_http(ports: PortRange) -> socket.socket:
    """A listening TCP socket. Raises: ListenError."""
    family = socket.AF_INET6 if ":" in ports.host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((ports.host, ports.base))
        sock.listen(1024)
    except (OSError, UnicodeError) as error:
        sock.close()
        number, reason = _number_and_reason(error)
        raise _listen_error(ports, ports.base, number, reason) from error
    sock.setblocking(False)
    return sock


def _listen_error(ports: PortRange, port: int, number: int, reason: str) -> ListenError:
    kind = PortInUseError if number == errno.EADDRINUSE else ListenError
    remedy = (
        f"choose another port with {ports.option}, 0 for any"
        if number in _PORTS_FAULT
        else f"give an address of this machine with {ports.host_option}"
    )
    return kind(f"cannot listen on {ports.host}:{port} ({reason}): {remedy}")


def _number_and_reason(error: OSError | UnicodeError) -> tuple[int, str]:
    """0 for a host that cannot be looked up: its error numbers are not the system's."""
    if isinstance(error, UnicodeError):
        return 0, "no name of a host"
    return 0 if isinstance(error, socket.gaierror) else error.errno or 0, error.strerror or str(error)


def bind_ranks(
    context: zmq.Context[zmq.Socket[bytes]], kind: int, ports: PortRange, *, ranks: int, high_water_mark: int
) -> BoundRange:
    """One socket of `kind` per rank. high_water_mark: messages queued per peer, 0 for no limit.

    Raises: ListenError naming the first port that is taken.
    """
    for _ in range(0 if ports.base else _TRIES):
        with contextlib.suppress(PortInUseError):
            return _bind_once(context, kind, ports, ranks, high_water_mark)
    return _bind_once(context, kind, ports, ranks, high_water_mark)


def _bind_once(
    context: zmq.Context[zmq.Socket[bytes]], kind: int, ports: PortRange, ranks: int, high_water_mark: int
) -> BoundRange:
    sockets: list[zmq.Socket[bytes]] = []
    base = ports.base
    try:
        for rank in range(ranks):
            sock = context.socket(kind)
            sockets.append(sock)
            sock.set_hwm(high_water_mark)
            sock.setsockopt(zmq.LINGER, 0)
            sock.setsockopt(zmq.IPV6, 1 if ":" in ports.host else 0)
            bound = _bind(sock, ports, base + rank if base else 0)
            base = base or bound
    except ListenError:
        for sock in sockets:
            sock.close()
        raise
    return BoundRange(host=ports.host, base=base, sockets=sockets)


def _bind(sock: zmq.Socket[bytes], ports: PortRange, port: int) -> int:
    host = f"[{ports.host}]" if ":" in ports.host else ports.host
    try:
        sock.bind(f"tcp://{host}:{port or '*'}")
    except zmq.ZMQError as error:
        number = error.errno or 0
        reason = "no address of this machine" if number == errno.ENODEV else os.strerror(number)
        raise _listen_error(ports, port, number, reason) from error
    return int(sock.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
