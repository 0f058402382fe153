"""The thread that empties the engine's event and load sockets at once, whatever the rest of the process does.

The engine's publisher drops what its subscribers do not take, and its queue can hold up the scheduler. So nothing here
decodes, waits or looks at content: a message goes from the socket into a bounded queue.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import zmq
from zmq.utils.monitor import recv_monitor_message

from kvrouting_sidecar.event_queue import EventQueue, ReceivedBatch

_log = logging.getLogger(__name__)

# Messages that libzmq holds for this thread; beyond it the kernel's buffers and then the engine's own limit count.
_RECEIVE_HIGH_WATER_MARK = 100_000
_POLL_MS = 100
_RECONNECT_MS = 200
# Taken from one socket before the others get their turn.
_MESSAGES_PER_TURN = 512
_SEQUENCE_BYTES = 8


@dataclass(slots=True)
class LatestLoad:
    """The newest load report of a rank. payload: empty until one came."""

    payload: bytes = b""
    received_s: float = 0.0


@dataclass(kw_only=True, slots=True)
class RankSockets:
    """Where one rank publishes and where its messages go. load_endpoint: None if it publishes no load."""

    events_endpoint: str
    load_endpoint: str | None
    topic: str
    queue: EventQueue
    load: LatestLoad = field(default_factory=LatestLoad)
    connected: bool = False
    malformed_messages: int = 0


class EventReader:
    """One thread for all ranks of an engine; `start` and `stop` once each."""

    def __init__(
        self, ranks: Sequence[RankSockets], *, clock_s: Callable[[], float], on_end: Callable[[], None]
    ) -> None:
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
            self._read()
        finally:
            self._on_end()

    def _read(self) -> None:
        with zmq.Context() as context:
            turns = [turn for rank in self._ranks for turn in self._turns(context, rank)]
            poller = zmq.Poller()
            for socket, _ in turns:
                poller.register(socket, zmq.POLLIN)
            while not self._stopping.is_set():
                ready = dict(poller.poll(_POLL_MS))
                for socket, take in turns:
                    if socket in ready:
                        take(socket)
            for rank in self._ranks:
                rank.connected = False
            context.destroy(linger=0)

    def _turns(
        self, context: zmq.Context[zmq.Socket[bytes]], rank: RankSockets
    ) -> list[tuple[zmq.Socket[bytes], Callable[[zmq.Socket[bytes]], object]]]:
        events = _subscriber(context, rank.topic)
        monitor = events.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        events.connect(rank.events_endpoint)
        turns: list[tuple[zmq.Socket[bytes], Callable[[zmq.Socket[bytes]], object]]] = [
            (events, lambda socket: _take_events(socket, rank)),
            (monitor, lambda socket: _watch_connection(socket, events, rank)),
        ]
        if rank.load_endpoint is not None:
            load = _subscriber(context, "")
            load.connect(rank.load_endpoint)
            turns.append((load, lambda socket: self._take_load(socket, rank)))
        return turns

    def _take_load(self, socket: zmq.Socket[bytes], rank: RankSockets) -> None:
        for frames in _waiting(socket):
            rank.load.payload, rank.load.received_s = frames[-1], self._clock_s()


def _subscriber(context: zmq.Context[zmq.Socket[bytes]], topic: str) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.SUB)
    socket.setsockopt(zmq.RCVHWM, _RECEIVE_HIGH_WATER_MARK)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
    # A peer that is gone without a farewell is noticed, and the connection made anew.
    socket.setsockopt(zmq.HEARTBEAT_IVL, 5000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 15000)
    socket.setsockopt(zmq.SUBSCRIBE, topic.encode())
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


def _watch_connection(monitor: zmq.Socket[bytes], events: zmq.Socket[bytes], rank: RankSockets) -> None:
    while monitor.poll(0):
        event = recv_monitor_message(monitor)["event"]
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            rank.connected = True
            _log.info("connected to the engine's events", extra={"endpoint": rank.events_endpoint})
        elif rank.connected:
            rank.connected = False
            # What still waits is of the lost connection: the next one is not tried before _RECONNECT_MS.
            while _take_events(events, rank):
                pass
            rank.queue.connection_lost()
            _log.warning("lost the engine's events", extra={"endpoint": rank.events_endpoint})


def _take_events(socket: zmq.Socket[bytes], rank: RankSockets) -> int:
    messages = _waiting(socket)
    for frames in messages:
        if len(frames) < 2 or len(frames[-2]) != _SEQUENCE_BYTES:
            rank.malformed_messages += 1
            continue
        rank.queue.put(ReceivedBatch(sequence=int.from_bytes(frames[-2], "big"), payload=frames[-1]))
    return len(messages)
