"""What the router tells a tracer. With tracing off nothing is made, and the client's trace context passes through."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from kvrouting_core.routing.decision import Decision


class AttemptTrace(Protocol):
    """The span of one attempt on an engine."""

    @property
    def headers(self) -> Mapping[str, str]:
        """Trace context for the engine, in place of the client's; empty: the client's own."""

    def end(self, *, status: int | None, error: str | None) -> None:
        """status: the engine's, None if it sent none. error: None if all went well."""


class RequestTrace(Protocol):
    """The server span of one request and its children."""

    def tokenize(self) -> AbstractContextManager[None]:
        """Spans template, tokenizer and hash."""

    def decide(self) -> AbstractContextManager[None]:
        """Spans the wait for a decision."""

    def decided(self, decision: Decision, /) -> None:
        """Inside `decide`: the terms of every candidate."""

    def attempt(self, decision: Decision, endpoint: str, /) -> AttemptTrace:
        """An attempt begins."""

    def end(self, *, status: int, error: str | None) -> None:
        """The answer is complete."""


class Tracer(Protocol):
    """Makes spans, or does not."""

    def request(self, headers: Mapping[str, str], /, *, path: str) -> RequestTrace:
        """A request has arrived with these headers."""

    def close(self) -> None:
        """Sends what is left."""


_NOTHING: AbstractContextManager[None] = nullcontext()
_NO_HEADERS: Mapping[str, str] = {}


class _NoAttemptTrace:
    """Hears, and keeps nothing."""

    headers = _NO_HEADERS

    def end(self, **_: object) -> None:
        """Nothing was begun."""


class _NoRequestTrace:
    """Hears, and keeps nothing."""

    def tokenize(self) -> AbstractContextManager[None]:
        return _NOTHING

    def decide(self) -> AbstractContextManager[None]:
        return _NOTHING

    def decided(self, *_: object) -> None:
        """Nothing was begun."""

    def attempt(self, *_: object) -> AttemptTrace:
        return _NO_ATTEMPT

    def end(self, **_: object) -> None:
        """Nothing was begun."""


_NO_ATTEMPT = _NoAttemptTrace()
_NO_REQUEST = _NoRequestTrace()


class NoTracer:
    """Tracing is off."""

    def request(self, *_: object, **__: object) -> RequestTrace:
        """One object for all requests."""
        return _NO_REQUEST

    def close(self) -> None:
        """There is nothing left to send."""
