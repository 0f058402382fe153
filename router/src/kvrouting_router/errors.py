"""What can go wrong with a request, and the one table that translates it to HTTP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


class RouterError(Exception):
    """A request that gets no answer from an engine. The message is meant for the client."""

    code: str | None = None

    @property
    def message(self) -> str:
        """What went wrong, naming the value."""
        return str(self)


class InvalidRequestError(RouterError):
    """The request breaks the API's rules."""


class MalformedJsonError(InvalidRequestError):
    """The body is no JSON object in UTF-8."""


class MalformedHttpError(InvalidRequestError):
    """The bytes on the connection are no HTTP request."""


class UnauthenticatedError(RouterError):
    """API keys are configured, and the request has none of them."""

    code = "invalid_api_key"


class UnknownModelError(RouterError):
    """The pool serves another model."""

    code = "model_not_found"


class UnknownPathError(RouterError):
    """There is nothing at this path."""


class WrongMethodError(RouterError):
    """The path exists, with another method."""


class ClientTooSlowError(RouterError):
    """The client did not send its request within the time limit."""


class BodyTooLargeError(RouterError):
    """The body exceeds the limit."""


class UnsupportedContentTypeError(RouterError):
    """The body is of another kind than plain JSON."""


class HeadersTooLargeError(RouterError):
    """Request line or headers exceed the limit."""


class OverloadedError(RouterError):
    """Every worker is past its limit."""

    refusal = "overloaded"

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class NotReadyError(RouterError):
    """The router cannot serve now, and knows of no reason why it should not serve soon."""

    # A guess: nobody knows when a worker comes. Long enough for a herd of clients to do no harm.
    retry_after_s = 5.0


class NoWorkerReadyError(NotReadyError):
    """No worker may be chosen."""

    refusal = "no_worker"


class StoppingError(NotReadyError):
    """The router is shutting down; another one stands behind the same name, or soon will."""

    retry_after_s = 1.0

    refusal = "stopping"


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineAnswer:
    """A complete answer of an engine, to be handed on as it is."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""


class UpstreamError(RouterError):
    """An attempt on a worker failed by the worker's fault.

    answer: what the engine said, if it said anything (5xx); handed on if no other worker can serve.
    """

    def __init__(self, message: str, *, answer: EngineAnswer | None = None) -> None:
        super().__init__(message)
        self.answer = answer


class UpstreamTimeoutError(UpstreamError):
    """The worker did not answer within the limit."""


class TotalTimeoutError(RouterError):
    """The request as a whole took longer than its limit."""


HTTP_STATUS: Mapping[type[RouterError], int] = {
    InvalidRequestError: 400,
    MalformedJsonError: 400,
    MalformedHttpError: 400,
    UnauthenticatedError: 401,
    UnknownModelError: 404,
    UnknownPathError: 404,
    WrongMethodError: 405,
    ClientTooSlowError: 408,
    BodyTooLargeError: 413,
    UnsupportedContentTypeError: 415,
    OverloadedError: 429,
    HeadersTooLargeError: 431,
    UpstreamError: 502,
    NotReadyError: 503,
    NoWorkerReadyError: 503,
    StoppingError: 503,
    UpstreamTimeoutError: 504,
    TotalTimeoutError: 504,
}
"""Error → status; what is not listed is our own bug: 500."""


def http_status(error: BaseException) -> int:
    """The status for an error; 500 for one that the table does not list."""
    return HTTP_STATUS.get(type(error), 500) if isinstance(error, RouterError) else 500
