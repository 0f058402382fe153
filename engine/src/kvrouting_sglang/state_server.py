"""The state socket of one rank, answered by a thread of its own; docs/state-socket.md has the format."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import msgspec
import zmq

_POLL_MS = 500
_UNSENT_LIMIT_S = 10

Answers = Iterable[Mapping[str, Any]]

logger = logging.getLogger(__name__)


class StateSocketError(RuntimeError):
    """The state socket cannot be opened."""


class StateServer:
    """operations: `op` -> its answers in order; the last one gets `"end": true`."""

    def __init__(self, endpoint: str, operations: Mapping[str, Callable[[], Answers]]) -> None:
        self._endpoint = endpoint
        self._operations = operations
        self._encoder = msgspec.msgpack.Encoder()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="kvrouting-state", daemon=True)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        # A snapshot is sent as a whole; a limit would drop its chunks without a word.
        self._socket.setsockopt(zmq.SNDHWM, 0)
        # A client that left is told by an error, so that the rest of its snapshot is not read for nobody.
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)

    @property
    def endpoint(self) -> str:
        """Where it answers, once started."""
        return self._socket.get_string(zmq.LAST_ENDPOINT).rstrip("\0")

    def start(self) -> None:
        """Opens the socket and answers from now on. Raises: StateSocketError if the endpoint cannot be bound."""
        try:
            self._socket.bind(self._endpoint)
        except zmq.ZMQError as error:
            self._close()
            raise StateSocketError(
                f"cannot open the state socket at {self._endpoint}: {error}; set KVROUTING_ENGINE_STATE_ENDPOINT to a "
                "free tcp://HOST:PORT (one port per data-parallel rank), or to 'off'"
            ) from error
        self._thread.start()

    def stop(self) -> None:
        """Answers no more and closes the socket."""
        self._stopping.set()
        self._thread.join(timeout=_UNSENT_LIMIT_S)
        self._close()

    def _close(self) -> None:
        self._socket.close()
        self._context.term()

    def _serve(self) -> None:
        while not self._stopping.is_set():
            if self._socket.poll(_POLL_MS):
                *envelope, body = self._socket.recv_multipart()
                self._answer(envelope, body)

    def _answer(self, envelope: list[bytes], body: bytes) -> None:
        try:
            for answer in self._encoded(body):
                self._socket.send_multipart([*envelope, answer])
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            logger.info("a client of the state socket left before its answer was sent")

    def _encoded(self, body: bytes) -> Iterator[bytes]:
        try:
            for answer in self._answers(body):
                yield self._encoder.encode(answer)
        # Whatever one answer fails of, the thread outlives it: the engine would be silent to its sidecar for good.
        except Exception as error:
            logger.exception("a question to the state socket could not be answered")
            yield self._encoder.encode({"error": f"{type(error).__name__}: {error}", "end": True})

    def _answers(self, body: bytes) -> Iterator[Mapping[str, Any]]:
        operation, complaint = self._operation(body)
        if operation is None:
            yield {"error": complaint, "end": True}
            return
        held: Mapping[str, Any] | None = None
        for answer in operation():
            if held is not None:
                yield held
            held = answer
        yield {**(held or {}), "end": True}

    def _operation(self, body: bytes) -> tuple[Callable[[], Answers] | None, str]:
        """What is asked for, or None and why it cannot be answered."""
        try:
            asked = msgspec.msgpack.decode(body)
        except msgspec.DecodeError as error:
            return None, f"the request is no msgpack: {error}"
        name = asked.get("op") if isinstance(asked, dict) else None
        operation = self._operations.get(name) if isinstance(name, str) else None
        return operation, f"unknown op {name!r}: ask for one of {', '.join(self._operations)}"
