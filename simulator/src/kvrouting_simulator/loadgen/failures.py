"""Why no answer came: the kinds by which a report counts what went wrong on the way to an endpoint."""

from __future__ import annotations

import errno

import aiohttp

_KIND_OF_ERRNO = {
    errno.ECONNREFUSED: "connection_refused",
    errno.ETIMEDOUT: "connection_timeout",
    errno.EHOSTUNREACH: "unreachable",
    errno.ENETUNREACH: "unreachable",
    errno.ECONNRESET: "connection_reset",
    errno.EPIPE: "connection_reset",
}


def connection_failure(error: OSError | aiohttp.ClientError) -> str:
    """`kind: detail` of an error before any answer; `connection` is what has no kind of its own."""
    return f"{_kind(error)}: {str(error) or type(error).__name__}"


def _kind(error: OSError | aiohttp.ClientError) -> str:
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return "dns"
    if isinstance(error, aiohttp.ClientSSLError):
        return "tls"
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return "connection_reset"
    if isinstance(error, aiohttp.InvalidURL):
        return "url"
    number = error.errno if isinstance(error, OSError) else None
    return _KIND_OF_ERRNO.get(number or 0, "connection")
