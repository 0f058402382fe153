"""The thread that empties the engine's event and load sockets at once, whatever the rest of the process does.

The engine's publisher drops what its subscribers do not take, and its queue can hold up the scheduler. So nothing here
decodes, waits or looks at content: a message goes from the socket into a bounded queue.

An event socket serves one connection and is then replaced, instead of being left to connect again by itself: so what
came over one connection, from one engine process, can never be mixed up with what came over the next.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from kvrouting_sidecar.dialling import dial
from kvrouting_sidecar.event_queue import EventQueue, ReceivedBatch

_log = logging.getLogger(__name__)

# Messages that libzmq holds for this thread; beyond it the kernel's buffers and then the engine's own limit count.
_RECEIVE_HIGH_WATER_MARK = 100_000
_POLL_MS = 50
_RECONNECT_S = 0.2
_CONNECT_LIMIT_MS = 3000
# A peer that is gone without a farewell is noticed.
_PING_MS, _PING_LIMIT_MS = 5_000, 15_000
# Taken from one socket before the others get their turn.
_MESSAGES_PER_TURN = 512
_SEQUENCE_BYTES = 8
_ENDINGS = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


@dataclass(slots=True)
class LatestLoad:
    """The newest load report of a rank. payload: empty until one came."""

    payload: bytes = b""
    received_s: float = 0.0


@dataclass(kw_only=True, slots=True)
class Published:
    """Where one rank publishes and where its messages go.

    load_endpoint: None if it publishes no load. connection: the number of the latest one, from 1. connected: whether it
    stands. wanted_connection: set from outside, a number above `connection` for a new one.
    """

    events_endpoint: str
    load_endpoint: str | None
    topic: str
    queue: EventQueue
    load: LatestLoad = field(default_factory=LatestLoad)
    connection: int = 0
    connected: bool = False
    wanted_connection: int = 1
    malformed_messages: int = 0

    def ask_for_new_connection(self) -> int:
        """What came before is not wanted. Returns: the number from which on the messages are."""
        self.wanted_connection = self.connection + 1
        return self.wanted_connection


class _Subscription:
    """One event socket, and the watch over its one connection."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], rank: Published, *, opened_s: float) -> None:
        self.opened_s = opened_s
        self.ended = False
        self.socket = _subscriber(context, rank.topic)
        self.socket.setsockopt(zmq.RECONNECT_IVL, -1)
        self.monitor = self.socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | _ENDINGS)
        dial(self.socket, rank.events_endpoint)

    def close(self) -> None:
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close(0)


class EventReader:
    """One thread for all ranks of an engine; `start` and `stop` once each."""

    def __init__(self, ranks: Sequence[Published], *, clock_s: Callable[[], float], on_end: Callable[[], None]) -> None:
        """on_end: called from the thread when it ends, for whatever reason."""
        self._ranks = ranks
        self._clock_s = clock_s
        self._on_end = on_end
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine-events", daemon=True)

    def start(self) -> None:
        """Subscribe and begin to read."""
        self._thread.start()

    def stop(self) -> None:
        """Close the sockets; returns when the thread has ended, within some 100 ms."""
        self._stopping.set()
        self._thread.join(timeout=5)

    @property
    def alive(self) -> bool:
        """The thread runs."""
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            with zmq.Context() as context:
                self._read(context)
        finally:
            self._on_end()

    def _read(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        poller = zmq.Poller()
        loads = [(_load_subscriber(context, rank.load_endpoint), rank) for rank in self._ranks if rank.load_endpoint]
        for socket, _ in loads:
            poller.register(socket, zmq.POLLIN)
        subscriptions: list[_Subscription | None] = [None for _ in self._ranks]
        try:
            while not self._stopping.is_set():
                for index, rank in enumerate(self._ranks):
                    subscriptions[index] = self._kept_open(context, poller, rank, subscriptions[index])
                self._take_turn(dict(poller.poll(_POLL_MS)), subscriptions, loads)
        finally:
            for rank, subscription in zip(self._ranks, subscriptions, strict=True):
                rank.connected = False
                if subscription is not None:
                    subscription.close()
            for socket, _ in loads:
                socket.close(0)

    def _take_turn(
        self,
        ready: dict[Any, int],
        subscriptions: Sequence[_Subscription | None],
        loads: Sequence[tuple[zmq.Socket[bytes], Published]],
    ) -> None:
        for rank, subscription in zip(self._ranks, subscriptions, strict=True):
            if subscription is not None and subscription.socket in ready:
                _take_events(subscription.socket, rank)
            if subscription is not None and subscription.monitor in ready:
                _watch_connection(subscription, rank)
        for socket, rank in loads:
            if socket in ready:
                for frames in _waiting(socket):
                    rank.load.payload, rank.load.received_s = frames[-1], self._clock_s()

    def _kept_open(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        poller: zmq.Poller,
        rank: Published,
        current: _Subscription | None,
    ) -> _Subscription | None:
        """The rank's subscription, replaced if its connection has ended or another is wanted."""
        now_s = self._clock_s()
        wanted = rank.wanted_connection > rank.connection
        if current is not None:
            due = current.ended and now_s >= current.opened_s + _RECONNECT_S
            if not wanted and not due:
                return current
            poller.unregister(current.socket)
            poller.unregister(current.monitor)
            current.close()
        rank.connected = False
        rank.connection += 1
        rank.queue.new_connection(rank.connection)
        subscription = _Subscription(context, rank, opened_s=now_s)
        poller.register(subscription.socket, zmq.POLLIN)
        poller.register(subscription.monitor, zmq.POLLIN)
        return subscription


def _subscriber(context: zmq.Context[zmq.Socket[bytes]], topic: str) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.SUB)
    socket.setsockopt(zmq.RCVHWM, _RECEIVE_HIGH_WATER_MARK)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.CONNECT_TIMEOUT, _CONNECT_LIMIT_MS)
    socket.setsockopt(zmq.HEARTBEAT_IVL, _PING_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _PING_LIMIT_MS)
    socket.setsockopt(zmq.SUBSCRIBE, topic.encode())
    return socket


def _load_subscriber(context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> zmq.Socket[bytes]:
    """A report stands for itself, so this socket may connect again as it likes."""
    socket = _subscriber(context, "")
    dial(socket, endpoint)
    return socket


def _waiting(socket: zmq.Socket[bytes]) -> list[list[bytes]]:
    """Some of the messages that can be had without waiting."""
    taken: list[list[bytes]] = []
    try:
        while len(taken) < _MESSAGES_PER_TURN:
            taken.append(socket.recv_multipart(zmq.NOBLOCK))
    except zmq.Again:
        pass  # the socket is empty, which is the aim
    return taken


def _watch_connection(subscription: _Subscription, rank: Published) -> None:
    while subscription.monitor.poll(0):
        event = recv_monitor_message(subscription.monitor)["event"]
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            rank.connected = True
            rank.queue.announce()
            _log.info("connected to the engine's events", extra={"endpoint": rank.events_endpoint})
        elif event & _ENDINGS and not subscription.ended:
            while _take_events(subscription.socket, rank):
                pass
            if rank.connected:
                _log.warning("lost the engine's events", extra={"endpoint": rank.events_endpoint})
            subscription.ended, rank.connected = True, False


def _take_events(socket: zmq.Socket[bytes], rank: Published) -> int:
    messages = _waiting(socket)
    for frames in messages:
        if len(frames) < 2 or len(frames[-2]) != _SEQUENCE_BYTES:
            rank.malformed_messages += 1
            continue
        rank.queue.put(ReceivedBatch(sequence=int.from_bytes(frames[-2], "big"), payload=frames[-1]))
    return len(messages)
