"""The reading thread on real sockets: it delivers, marks connections and survives nonsense."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import zmq

from kvrouting_sidecar.event_queue import EventQueue, NewConnection, Received, ReceivedBatch
from kvrouting_sidecar.event_reader import EventReader, Published


@contextmanager
def _publisher(port: int = 0, host: str = "127.0.0.1") -> Iterator[tuple[zmq.Socket[bytes], int]]:
    with zmq.Context() as context, context.socket(zmq.PUB) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, int("[" in host))
        socket.bind(f"tcp://{host}:{port or '*'}")
        endpoint = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        yield socket, int(endpoint.rpartition(":")[2])


@contextmanager
def _reading(port: int, host: str = "127.0.0.1") -> Iterator[Published]:
    queue = EventQueue(limit_bytes=1 << 20, on_arrival=lambda: None)
    published = Published(events_endpoint=f"tcp://{host}:{port}", load_endpoint=None, topic="kv", queue=queue)
    ended = threading.Event()
    reader = EventReader([published], clock_s=time.monotonic, on_end=ended.set)
    reader.start()
    try:
        yield published
    finally:
        reader.stop()
    assert ended.is_set()
    assert not published.connected


def _until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 45
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come to hold"
        time.sleep(0.005)


def _send(socket: zmq.Socket[bytes], sequence: int, published: Published, wanted: int) -> None:
    """Send until the reader has it: a subscription takes a moment to arrive."""

    def arrived() -> bool:
        socket.send_multipart([b"kv", sequence.to_bytes(8, "big"), b"payload"])
        return len(published.queue) >= wanted

    _until(arrived)


def _taken(published: Published) -> list[Received]:
    return [published.queue.take() for _ in range(len(published.queue))]


def test_it_delivers_batches_of_its_topic_and_counts_nonsense() -> None:
    with _publisher() as (socket, port), _reading(port) as published:
        _until(lambda: published.connected)
        _send(socket, 5, published, 2)
        socket.send_multipart([b"other", (6).to_bytes(8, "big"), b"payload"])
        socket.send_multipart([b"kv", b"short", b"payload"])
        socket.send_multipart([b"kv"])
        _until(lambda: published.malformed_messages == 2)
        first, *batches = _taken(published)
        assert first == NewConnection(number=1)
        assert set(batches) == {ReceivedBatch(sequence=5, payload=b"payload")}


@pytest.mark.skipif(not socket.has_ipv6, reason="this Python has no IPv6")
@pytest.mark.parametrize("host", ["[::1]", "localhost"])
def test_an_engine_may_be_at_an_ipv6_address_or_a_name(host: str) -> None:
    bound = "127.0.0.1" if host == "localhost" else host
    with _publisher(host=bound) as (publisher, port), _reading(port, host) as published:
        _until(lambda: published.connected)
        _send(publisher, 0, published, 2)


def test_each_connection_has_its_mark_before_its_batches() -> None:
    with _publisher() as (socket, port), _reading(port) as published:
        _send(socket, 0, published, 2)
        socket.close(0)
        _until(lambda: not published.connected)
        with _publisher(port) as (successor, _):
            _until(lambda: published.connected)
            before = len(published.queue)
            _send(successor, 9, published, before + 1)
            taken = _taken(published)
    marks = [item.number for item in taken if isinstance(item, NewConnection)]
    assert marks == list(range(1, marks[-1] + 1))
    last_mark = taken.index(NewConnection(number=marks[-1]))
    assert {item.sequence for item in taken[:last_mark] if isinstance(item, ReceivedBatch)} == {0}
    assert {item.sequence for item in taken[last_mark:] if isinstance(item, ReceivedBatch)} == {9}


def test_a_new_connection_can_be_asked_for() -> None:
    with _publisher() as (socket, port), _reading(port) as published:
        _until(lambda: published.connected)
        number = published.ask_for_new_connection()
        _until(lambda: published.connected and published.connection == number)
        _send(socket, 3, published, 3)
        assert NewConnection(number=number) in _taken(published)


def test_an_engine_that_is_not_there_yet_is_tried_again() -> None:
    with _publisher() as (_, port):
        pass
    with _reading(port) as published:
        _until(lambda: published.connection >= 3)
        assert not published.connected
        with _publisher(port) as (socket, _):
            _until(lambda: published.connected)
            _send(socket, 1, published, len(published.queue) + 1)
