"""Errors in the shape of the API that was asked: OpenAI's error object, SGLang's for /generate."""

from __future__ import annotations

import enum
import math

import msgspec

from kvrouting_router.errors import NotReadyError, OverloadedError, RouterError, http_status

# OpenAI's names for kinds of errors; what is not listed is a server_error.
_OPENAI_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    503: "service_unavailable_error",
}
_OUR_BUG = "the router failed on this request; its log has the reason"


class ErrorShape(enum.Enum):
    """Whose error object."""

    OPENAI = "openai"
    SGLANG = "sglang"


def error_object(error: BaseException, shape: ErrorShape) -> dict[str, object]:
    """The JSON object of an error; the inside of our own bugs is not shown."""
    message = error.message if isinstance(error, RouterError) else _OUR_BUG
    if shape is ErrorShape.SGLANG:
        return {"error": {"message": message}}
    status = http_status(error)
    code = error.code if isinstance(error, RouterError) else None
    kind = _OPENAI_TYPES.get(status, "server_error")
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def error_body(error: BaseException, shape: ErrorShape) -> bytes:
    """The error as a JSON body."""
    return msgspec.json.encode(error_object(error, shape))


def error_event(error: BaseException, shape: ErrorShape) -> bytes:
    """The error as the last server-sent event of a stream that has begun."""
    return b"data: " + error_body(error, shape) + b"\n\n"


def error_headers(error: BaseException) -> dict[str, str]:
    """Headers that belong to an error: when to come again, how to authenticate."""
    if isinstance(error, OverloadedError | NotReadyError):
        return {"Retry-After": str(max(1, math.ceil(error.retry_after_s)))}
    if http_status(error) == 401:
        return {"WWW-Authenticate": "Bearer"}
    return {}
