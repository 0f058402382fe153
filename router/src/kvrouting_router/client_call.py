"""One client's generation request, as far as it is the same for every attempt."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import secrets
from collections.abc import Iterable
from concurrent.futures import Executor
from dataclasses import dataclass

from aiohttp import web
from multidict import CIMultiDict

from kvrouting_core.routing.events import RoutingRequest
from kvrouting_router.errors import (
    BodyTooLargeError,
    ClientTooSlowError,
    MalformedHttpError,
    UnauthenticatedError,
    UnsupportedContentTypeError,
)
from kvrouting_router.http_headers import to_engine
from kvrouting_router.options import SizeLimits, TimeLimits
from kvrouting_router.prompt_reading import ReadPrompt
from kvrouting_router.request_forms import Api, GenerationForm, decode_body, parse_form

# Decoding more than this holds the loop for longer than the hop to a thread takes.
_DECODE_ON_LOOP_BYTES = 64 * 1024


class ApiKeys:
    """The keys that clients may present; none at all: everybody may."""

    def __init__(self, keys: Iterable[str]) -> None:
        self.replace(keys)

    def replace(self, keys: Iterable[str]) -> None:
        """From now on these."""
        # Digests are compared, so the time of a look-up tells nothing of a key.
        self._digests = frozenset(_digest(k) for k in keys)

    def __bool__(self) -> bool:
        return bool(self._digests)

    def check(self, authorization: str | None) -> None:
        """authorization: the header's value. Raises: UnauthenticatedError."""
        if not self._digests:
            return
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or _digest(key.strip()) not in self._digests:
            raise UnauthenticatedError("a valid API key is needed: Authorization: Bearer KEY")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


class RequestIds:
    """Names for requests that no other router process uses."""

    def __init__(self) -> None:
        self._prefix = secrets.token_hex(6)
        self._numbers = itertools.count(1)

    def next(self) -> str:
        """A new name."""
        return f"{self._prefix}-{next(self._numbers)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ClientCall:
    """What came from the client."""

    request_id: str
    api: Api
    form: GenerationForm
    body: bytes
    query: str
    headers: CIMultiDict[str]
    arrived_ms: float
    deadline_s: float

    def routing(self, prompt: ReadPrompt) -> RoutingRequest:
        """The request as the policy sees it."""
        return RoutingRequest(
            request_id=self.request_id,
            blocks=prompt.blocks,
            prompt_tokens=prompt.prompt_tokens,
            further_prompt_tokens=prompt.further_prompt_tokens,
            sequences=self.form.sequences,
            max_output_tokens=self.form.max_output_tokens,
        )


class CallReader:
    """Reads and checks requests before anything is done for them."""

    def __init__(self, *, model: str, keys: ApiKeys, times: TimeLimits, sizes: SizeLimits, executor: Executor) -> None:
        self._model = model
        self._keys = keys
        self._times = times
        self._sizes = sizes
        self._executor = executor
        self._ids = RequestIds()

    async def read(self, request: web.BaseRequest, api: Api, *, arrived_ms: float) -> ClientCall:
        """Raises: the errors of `errors.py` that are the client's fault."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self._times.total_s
        self._keys.check(request.headers.get("Authorization"))
        _check_content(request)
        body = await read_body(request, limit_bytes=self._sizes.max_body_bytes, limit_s=self._times.client_read_s)
        if len(body) > _DECODE_ON_LOOP_BYTES:
            form = await loop.run_in_executor(self._executor, self._parse, api, body)
        else:
            form = self._parse(api, body)
        return ClientCall(
            request_id=self._ids.next(),
            api=api,
            form=form,
            body=body,
            query=request.query_string,
            headers=to_engine(request.headers, drop_authorization=bool(self._keys)),
            arrived_ms=arrived_ms,
            deadline_s=deadline_s,
        )

    def _parse(self, api: Api, body: bytes) -> GenerationForm:
        return parse_form(api, decode_body(body), model=self._model, max_sequences=self._sizes.max_sequences)


def _check_content(request: web.BaseRequest) -> None:
    kind = request.headers.get("Content-Type", "")
    if kind.partition(";")[0].strip().lower() != "application/json":
        raise UnsupportedContentTypeError(f"the content type must be application/json, got {kind or 'none'!r}")
    coding = request.headers.get("Content-Encoding", "identity")
    if coding.lower() != "identity":
        raise UnsupportedContentTypeError(f"the body must be sent without content encoding, got {coding!r}")


async def read_body(request: web.BaseRequest, *, limit_bytes: int, limit_s: float) -> bytes:
    """The whole body. Raises: BodyTooLargeError, ClientTooSlowError, MalformedHttpError."""
    declared = request.content_length
    if declared is not None and declared > limit_bytes:
        raise BodyTooLargeError(f"the body has {declared} bytes; the limit is {limit_bytes}")
    if request.headers.get("Expect", "").lower() == "100-continue":
        await _say_continue(request)
    content = request.content
    if content.is_eof():  # a small body comes along with its headers
        body: bytes = content.read_nowait()
        if len(body) > limit_bytes:
            raise BodyTooLargeError(f"the body has {len(body)} bytes; the limit is {limit_bytes}")
        return body
    pieces: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(limit_s):
            while piece := await content.readany():
                size += len(piece)
                if size > limit_bytes:
                    raise BodyTooLargeError(f"the body has more than the limit of {limit_bytes} bytes")
                pieces.append(piece)
    except TimeoutError as error:
        raise ClientTooSlowError(f"the body did not arrive within {limit_s:g} s") from error
    except web.RequestPayloadError as error:
        raise MalformedHttpError(f"the body is broken: {error}") from error
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


async def _say_continue(request: web.BaseRequest) -> None:
    writer = request.writer
    await writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    writer.output_size = 0  # the final answer is still to come
