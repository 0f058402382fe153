"""One answer on its way: what a rank produces and a handler reads."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kvrouting_core.blocks import Namespace

FinishKind = Literal["length", "stop", "abort"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """Token ids of one prompt and the namespace in which the cache may know them."""

    tokens: array[int]
    namespace: Namespace

    def __post_init__(self) -> None:
        if not self.tokens:
            raise ValueError("the prompt has no tokens")


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """The answer that will have been made up: its tokens in order, and why it ends after them.

    text_length: characters of it that are shown, None for all; matched: the stop string that ended it, if one did.
    """

    tokens: Sequence[int]
    ends: FinishKind
    text_length: int | None = None
    matched: str | None = None


class RequestIdInUseError(ValueError):
    """A client gave two requests in flight the same id."""


class EngineGoneError(ConnectionError):
    """The engine that ran the request is no more: its process ended, in reality or in play."""


class Generation:
    """Tokens as they come, on the event loop.

    Times are the loop's, in seconds; None: not yet. finish: None while the answer goes on.
    """

    __slots__ = (
        "answer", "cached_tokens", "ended", "ended_s", "finish", "first_token_s", "key", "listener", "prompt_tokens",
        "request_id", "submitted_s", "tokens",
    )  # fmt: skip

    def __init__(self, *, key: str, request_id: str, prompt_tokens: int, answer: Answer, submitted_s: float) -> None:
        """key: the engine model's id; request_id: the client's or one that was made up for it."""
        self.key = key
        self.request_id = request_id
        self.prompt_tokens = prompt_tokens
        self.answer = answer
        self.tokens: list[int] = []
        self.cached_tokens = 0
        self.finish: FinishKind | None = None
        self.submitted_s = submitted_s
        self.first_token_s: float | None = None
        self.ended_s: float | None = None
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.listener: asyncio.Event | None = None
        """Set whenever there is something new."""

    def add(self, token: int, *, cached_tokens: int, now_s: float, last: bool) -> None:
        """One more token came out of a step."""
        if self.first_token_s is None:
            self.first_token_s = now_s
            self.cached_tokens = cached_tokens
        self.tokens.append(token)
        if last:
            self.end(self.answer.ends, now_s=now_s)
        else:
            self._tell()

    def end(self, finish: FinishKind, *, now_s: float) -> None:
        """The answer is complete or was cut off; the second time nothing happens."""
        if self.ended.done():
            return
        self.finish, self.ended_s = finish, now_s
        self.ended.set_result(None)
        self._tell()

    def lose(self) -> None:
        """The engine is gone: who waits gets EngineGoneError."""
        if self.ended.done():
            return
        self.ended.set_exception(EngineGoneError(f"the engine restarted under request {self.request_id}"))
        self.ended.exception()  # marks it as seen: nobody may be waiting
        self._tell()

    def _tell(self) -> None:
        if self.listener is not None:
            self.listener.set()
