"""The state socket's thread outlives whatever one question comes to."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq

from kvrouting_sglang.state_server import StateServer

_ANSWER_LIMIT_MS = 60_000


class _Operations:
    """One that answers, and three that do not come to their end."""

    def __init__(self) -> None:
        self.ended = threading.Event()

    def state(self) -> Iterator[dict[str, Any]]:
        yield {"epoch": "e1"}

    def raising(self) -> Iterator[dict[str, Any]]:
        yield {"position": 1}
        yield {"position": 1}
        raise KeyError("node 7")

    def unencodable(self) -> Iterator[dict[str, Any]]:
        yield {"digest": 2**70}

    def endless(self) -> Iterator[dict[str, Any]]:
        try:
            while True:
                time.sleep(0.001)  # so that little is under way when the client leaves
                yield {"position": 1}
        finally:
            self.ended.set()


class _Client:
    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> None:
        self._socket = context.socket(zmq.DEALER)
        self._socket.connect(endpoint)

    def ask(self, operation: str) -> None:
        self._socket.send_multipart([b"", msgspec.msgpack.encode({"op": operation})])

    def answer(self) -> dict[str, Any]:
        assert self._socket.poll(_ANSWER_LIMIT_MS)
        answer: dict[str, Any] = msgspec.msgpack.decode(self._socket.recv_multipart()[-1])
        return answer

    def leave(self) -> None:
        self._socket.close(linger=0)


@pytest.fixture
def operations() -> _Operations:
    return _Operations()


@pytest.fixture
def endpoint(operations: _Operations) -> Iterator[str]:
    names = ("state", "raising", "unencodable", "endless")
    server = StateServer("tcp://127.0.0.1:*", {name: getattr(operations, name) for name in names})
    server.start()
    yield server.endpoint
    server.stop()


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    with zmq.Context() as context:
        yield context


@pytest.mark.parametrize(
    ("operation", "begun", "said"),
    [("raising", [{"position": 1}], "KeyError: 'node 7'"), ("unencodable", [], "OverflowError: ")],
)
def test_an_answer_that_fails_is_an_error_and_the_next_question_is_answered(
    operation: str,
    begun: list[dict[str, Any]],
    said: str,
    endpoint: str,
    context: zmq.Context[zmq.Socket[bytes]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    client = _Client(context, endpoint)
    client.ask(operation)
    assert [client.answer() for _ in begun] == begun
    failed = client.answer()
    client.ask("state")
    assert client.answer() == {"epoch": "e1", "end": True}
    client.leave()
    assert failed["end"] is True
    assert failed["error"].startswith(said)
    (logged,) = caplog.records
    assert logged.exc_info is not None


def test_the_snapshot_of_a_client_that_left_ends(
    operations: _Operations, endpoint: str, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    leaving, staying = _Client(context, endpoint), _Client(context, endpoint)
    leaving.ask("endless")
    assert leaving.answer() == {"position": 1}
    staying.ask("state")
    leaving.leave()
    assert staying.answer() == {"epoch": "e1", "end": True}
    assert operations.ended.is_set()
    staying.leave()
