"""What the handlers of the generating paths share: errors to statuses, streams that end with their client."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from aiohttp import web

from kvrouting_simulator.engine_model import RequestTooLong
from kvrouting_simulator.engine_process.generation import EngineGoneError, Generation, RequestIdInUseError
from kvrouting_simulator.engine_process.http_bodies import BadRequestError
from kvrouting_simulator.engine_process.rank import Rank
from kvrouting_simulator.engine_process.replies import ErrorBody, encode
from kvrouting_simulator.engine_process.text_stream import TextStream
from kvrouting_tokenization import ChatRequestError, Tokenizer

_log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def json_reply(body: object, *, status: int = 200) -> web.Response:
    """A JSON body."""
    return web.Response(body=encode(body), status=status, content_type="application/json")


def error_reply(message: str, *, status: int, kind: str, param: str | None = None) -> web.Response:
    """SGLang's error on the OpenAI paths."""
    return json_reply(ErrorBody(message=message, type=kind, code=status, param=param), status=status)


@web.middleware
async def errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turns what went wrong into the shape that SGLang gives it on that path.

    A request that an engine lost in a restart loses its connection too, as with a real process.
    """
    try:
        return await handler(request)
    except (BadRequestError, ChatRequestError, RequestIdInUseError, RequestTooLong) as error:
        if request.path == "/generate":
            return json_reply({"error": {"message": str(error)}}, status=400)
        return error_reply(str(error), status=400, kind="BadRequestError", param=getattr(error, "param", None))
    except EngineGoneError:
        cut(request)
        return web.Response(status=503)
    except web.HTTPException as error:
        return error_reply(error.text or error.reason, status=error.status, kind=error.reason)


def cut(request: web.Request) -> None:
    """Ends the connection without a word."""
    if request.transport is not None:
        request.transport.abort()


async def collected(rank: Rank, generations: Sequence[Generation]) -> None:
    """Waits for all answers; they are aborted if the client leaves meanwhile."""
    try:
        for generation in generations:
            await asyncio.shield(generation.ended)
    finally:
        for generation in generations:
            rank.abort(generation)


async def streamed(
    request: web.Request, rank: Rank, generations: Sequence[Generation], chunks: AsyncIterator[bytes]
) -> web.StreamResponse:
    """Writes chunks as they come; the answers are aborted if the client leaves meanwhile."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    try:
        await response.prepare(request)
        async for chunk in chunks:
            await response.write(chunk)
        await response.write_eof()
    except ConnectionResetError:
        _log.info("a client left its stream")
    except EngineGoneError:
        cut(request)
    finally:
        for generation in generations:
            rank.abort(generation)
    return response


async def pieces(
    generations: Sequence[Generation], tokenizer: Tokenizer
) -> AsyncIterator[tuple[int, Generation, str, str]]:
    """Index, generation, new text and whole text, each time an answer has grown or ended.

    Raises: EngineGoneError.
    """
    changed = asyncio.Event()
    changed.set()
    seen = [0] * len(generations)
    texts = [TextStream(tokenizer, length=g.answer.text_length) for g in generations]
    for generation in generations:
        generation.listener = changed
    left = list(range(len(generations)))
    while left:
        await changed.wait()
        changed.clear()
        for index in tuple(left):
            generation = generations[index]
            ended = generation.ended.done()
            if ended:
                generation.ended.result()
                left.remove(index)
            elif len(generation.tokens) == seen[index]:
                continue
            seen[index] = len(generation.tokens)
            delta = texts[index].extend(generation.tokens, last=ended)
            yield index, generation, delta, texts[index].text
