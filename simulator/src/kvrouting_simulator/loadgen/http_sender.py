"""Sends requests over HTTP and reads their streams as they come."""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import aiohttp

from kvrouting_core.routing.events import Outcome
from kvrouting_simulator.loadgen.apis import Api, PartialAnswer, StreamError
from kvrouting_simulator.loadgen.attempt import Attempt
from kvrouting_simulator.loadgen.failures import connection_failure
from kvrouting_simulator.workloads.work_item import ReadyRequest

DECISION_HEADER = "x-kvrouting-decision"
_DATA = b"data:"
_DONE = b"[DONE]"
_ERROR_BODY_BYTES = 300


class StreamCutError(ConnectionError):
    """The stream ended without its end mark."""


class RefusedError(Exception):
    """The endpoint answered with an error status."""

    def __init__(self, status: int, body: str) -> None:
        super().__init__(f"http_{status}: {body}")
        self.status = status


@dataclass(slots=True)
class _Exchange:
    """What is known of an exchange so far: it outlives the exception that ends it."""

    answer: PartialAnswer = field(default_factory=lambda: PartialAnswer(token_ids=array("I")))
    first_token_s: float | None = None
    worker: str | None = None
    streaming: bool = False


class HttpSender:
    """Sends to one endpoint. max_connections: at most so many at once, others wait; None: no limit."""

    def __init__(
        self,
        *,
        session: aiohttp.ClientSession,
        url: str,
        api: Api,
        timeout_s: float,
        monotonic_s: Callable[[], float],
        max_connections: int | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._session = session
        self._url = url.rstrip("/") + api.path
        self._api = api
        self._timeout_s = timeout_s
        self._monotonic_s = monotonic_s
        self._free = None if max_connections is None else asyncio.Semaphore(max_connections)
        self._headers = {"content-type": "application/json", **(headers or {})}

    async def send(self, request: ReadyRequest, *, on_sent: Callable[[], None]) -> Attempt:
        """Sends once. The limit of time covers connecting, waiting for the answer and reading it."""
        if self._free is None:
            return await self._send(request, on_sent)
        async with self._free:
            return await self._send(request, on_sent)

    async def _send(self, request: ReadyRequest, on_sent: Callable[[], None]) -> Attempt:
        body = self._api.body(request)
        on_sent()
        exchange = _Exchange()
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._exchange(request, body, exchange)
        except TimeoutError:
            return self._failed(exchange, f"timeout: no whole answer within {self._timeout_s:g} s")
        except RefusedError as error:
            refused = error.status < 500
            attempt = self._failed(exchange, str(error))
            return replace(attempt, outcome=Outcome.REJECTED, cut=False) if refused else attempt
        except StreamError as error:
            return self._failed(exchange, f"stream_error: {error}")
        except (StreamCutError, aiohttp.ClientPayloadError) as error:
            return self._failed(exchange, f"stream_cut: {error}")
        except (aiohttp.ClientError, OSError) as error:
            if exchange.streaming:
                return self._failed(exchange, f"stream_cut: {str(error) or type(error).__name__}")
            return self._failed(exchange, connection_failure(error))
        except ValueError as error:
            return self._failed(exchange, f"malformed: {error}")
        return self._attempt(exchange, Outcome.COMPLETED)

    def _failed(self, exchange: _Exchange, error: str) -> Attempt:
        attempt = self._attempt(exchange, Outcome.FAILED)
        return replace(attempt, error=error, cut=exchange.streaming)

    def _attempt(self, exchange: _Exchange, outcome: Outcome) -> Attempt:
        answer = exchange.answer
        counted = answer.output_tokens
        return Attempt(
            outcome=outcome,
            end_s=self._monotonic_s(),
            first_token_s=exchange.first_token_s,
            token_ids=answer.token_ids,
            output_tokens=counted if counted is not None else len(answer.token_ids) or answer.pieces,
            prompt_tokens=answer.prompt_tokens,
            cached_tokens=answer.cached_tokens,
            worker=exchange.worker,
        )

    async def _exchange(self, request: ReadyRequest, body: bytes, exchange: _Exchange) -> None:
        headers = {**self._headers, "x-request-id": request.request_id}
        async with self._session.post(self._url, data=body, headers=headers) as response:
            exchange.worker = worker_of(response.headers)
            if response.status >= 400:
                text = await response.text(errors="replace")
                raise RefusedError(response.status, " ".join(text[:_ERROR_BODY_BYTES].split()))
            exchange.streaming = True
            async for event in _events(response.content):
                self._api.read(event, exchange.answer)
                if exchange.first_token_s is None and exchange.answer.pieces:
                    exchange.first_token_s = self._monotonic_s()


async def _events(stream: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """The data of each server-sent event up to `[DONE]`; reads to the end, so that the connection can be used again.

    Raises: StreamCutError if the end mark never comes.
    """
    done = False
    async for line in stream:
        if done or not line.startswith(_DATA):
            continue
        data = line[len(_DATA) :].strip()
        done = data == _DONE
        if not done:
            yield data
    if not done:
        raise StreamCutError("the stream ended without [DONE]")


def worker_of(headers: Mapping[str, str]) -> str | None:
    """The worker that the router's decision header names; None without one."""
    text = headers.get(DECISION_HEADER)
    if not text:
        return None
    try:
        decision = json.loads(text)
    except ValueError:
        return None
    worker = decision.get("worker") if isinstance(decision, dict) else None
    return worker if isinstance(worker, str) else None


class FlushFailedError(RuntimeError):
    """A worker's cache was not flushed: the run would not begin from an empty cache."""


async def flush_caches(session: aiohttp.ClientSession, urls: Sequence[str], *, timeout_s: float) -> None:
    """Empties the cache of each engine. Raises: FlushFailedError naming the engine and its answer."""
    for url in urls:
        await _flush(session, url.rstrip("/") + "/flush_cache", timeout_s)


async def _flush(session: aiohttp.ClientSession, url: str, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s), session.post(url) as response:
            text = await response.text(errors="replace")
    except (TimeoutError, aiohttp.ClientError, OSError) as error:
        raise FlushFailedError(f"{url}: {str(error) or type(error).__name__}") from error
    if response.status != 200:
        raise FlushFailedError(f"{url} answered {response.status}: {text[:200].strip()}")
