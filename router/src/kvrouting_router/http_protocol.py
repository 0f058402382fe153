"""aiohttp's connection handler with our own answers to what is no HTTP, and a limit for slow headers."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import BadHttpMessage, LineTooLong
from aiohttp.web_protocol import RequestHandler

from kvrouting_router.error_bodies import ErrorShape, error_body, error_headers
from kvrouting_router.errors import (
    ClientTooSlowError,
    HeadersTooLargeError,
    MalformedHttpError,
    RouterError,
    http_status,
)

_logger = logging.getLogger(__name__)


def error_response(error: BaseException, shape: ErrorShape) -> web.Response:
    """An error as a JSON response in the API's own shape."""
    return web.Response(
        status=http_status(error),
        body=error_body(error, shape),
        headers=error_headers(error),
        content_type="application/json",
    )


class ClientConnection(RequestHandler):
    """One client's connection."""

    __slots__ = ("_headers_due", "_headers_limit_s")

    def __init__(self, server: web.Server, *, headers_limit_s: float, **options: Any) -> None:
        super().__init__(server, **options)
        self._headers_limit_s = headers_limit_s
        self._headers_due: asyncio.TimerHandle | None = None

    def data_received(self, data: bytes) -> None:
        """Starts the clock when headers begin, stops it when they are complete."""
        super().data_received(data)
        waiter = self._waiter
        if waiter is not None and not waiter.done() and not self._messages:
            if self._headers_due is None:
                self._headers_due = self._loop.call_later(self._headers_limit_s, self._headers_are_late)
        elif self._headers_due is not None:
            self._headers_due.cancel()
            self._headers_due = None

    def connection_lost(self, exc: BaseException | None) -> None:
        """Nobody is left to wait for."""
        if self._headers_due is not None:
            self._headers_due.cancel()
            self._headers_due = None
        super().connection_lost(exc)

    def _headers_are_late(self) -> None:
        self._headers_due = None
        if self.transport is None:
            return
        error = ClientTooSlowError(f"the headers did not arrive within {self._headers_limit_s:g} s")
        body = error_body(error, ErrorShape.OPENAI)
        self.transport.write(
            b"HTTP/1.1 408 Request Timeout\r\nContent-Type: application/json\r\nConnection: close\r\n"
            b"Content-Length: %d\r\n\r\n" % len(body) + body
        )
        self.force_close()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,  # noqa: ARG002  # aiohttp's signature; the error itself says it
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """What could not be parsed as HTTP, or an error that escaped the handler."""
        if isinstance(exc, ConnectionError):
            raise ConnectionError("the client has left") from exc
        error: BaseException
        if isinstance(exc, BadHttpMessage):
            error = _bad_http(exc)
        else:
            error = exc or RouterError(message or "")
            _logger.error("request failed", exc_info=exc)
        if request.writer.output_size > 0:
            raise ConnectionError("the answer has begun and cannot be replaced")
        response = error_response(error, ErrorShape.OPENAI)
        response.force_close()
        return response


def _bad_http(error: BadHttpMessage) -> RouterError:
    if isinstance(error, LineTooLong) or "Too many headers" in str(error):
        return HeadersTooLargeError(f"request line or headers are too large: {error.message[:120]}")
    return MalformedHttpError(f"this is no HTTP request: {error.message[:120]}")


class ClientServer(web.Server):
    """Makes a `ClientConnection` for each client."""

    def __init__(self, handler: Any, *, headers_limit_s: float, max_header_bytes: int) -> None:
        super().__init__(
            handler,
            handler_cancellation=True,
            access_log=None,
            # A body is passed on as it was sent.
            auto_decompress=False,
            keepalive_timeout=75.0,
            max_line_size=max_header_bytes,
            max_field_size=max_header_bytes,
        )
        self._headers_limit_s = headers_limit_s

    def __call__(self) -> ClientConnection:
        """A new connection."""
        return ClientConnection(self, loop=self._loop, headers_limit_s=self._headers_limit_s, **self._kwargs)


__all__ = ["ClientConnection", "ClientServer", "error_response"]
