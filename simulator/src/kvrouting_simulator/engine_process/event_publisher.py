"""Publishes KV event batches as SGLang's ZmqEventPublisher does: a bounded queue, a thread, PUB and replay.

Live: frames `[topic, sequence (8 bytes, big-endian), batch]`. Replay: a DEALER sends `[b"", first sequence]` and
gets `[b"", topic, sequence, batch]` for each kept batch from there on, then `[b"", b"", -1, b""]`.

The queue blocks the scheduler when it is full, the PUB socket drops at its high-water mark without a word: both
are SGLang's.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from dataclasses import dataclass

import msgspec
import zmq

from kvrouting_simulator.engine_process.event_faults import BatchFate, EventFaults
from kvrouting_simulator.engine_process.kv_events import EventBatch

KV_TOPIC = b"kv-events"
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
# SGLang's publisher looks for replay requests whenever its queue was empty for so long.
_IDLE_WAIT_S = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class PublisherLimits:
    """queue_batches: more block the scheduler. high_water_mark: messages per slow subscriber. replay_batches: kept."""

    queue_batches: int = 100_000
    high_water_mark: int = 100_000
    replay_batches: int = 10_000

    def __post_init__(self) -> None:
        for name in ("queue_batches", "high_water_mark", "replay_batches"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Numbered:
    sequence: int
    batch: EventBatch
    fate: BatchFate


class _Restarted:
    """In the queue: forget what was published, the next process numbers from 0."""


class EventPublisher:
    """One rank's publisher. `publish` and `restart` belong to one thread, the scheduler's."""

    def __init__(
        self,
        *,
        publish: zmq.Socket[bytes],
        replay: zmq.Socket[bytes] | None,
        limits: PublisherLimits,
        faults: EventFaults,
    ) -> None:
        """publish: a bound PUB socket; replay: a bound ROUTER socket. From `start` on they are the thread's."""
        self._publish = publish
        self._replay = replay
        self._faults = faults
        self._queue: queue.Queue[_Numbered | _Restarted | None] = queue.Queue(limits.queue_batches)
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=limits.replay_batches)
        self._late: deque[tuple[float, int, bytes, BatchFate]] = deque()
        self._next_sequence = 0
        self._blocked = 0
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)

    def start(self) -> None:
        """Begins to send; batches that were published before wait in the queue."""
        self._thread.start()

    @property
    def next_sequence(self) -> int:
        """Number that the next batch will carry."""
        return self._next_sequence

    @property
    def blocked_batches(self) -> int:
        """Batches that found the queue full and held the scheduler up."""
        return self._blocked

    def publish(self, batch: EventBatch) -> None:
        """Numbers a batch and queues it; blocks while the queue is full, as SGLang's scheduler does."""
        item = _Numbered(sequence=self._next_sequence, batch=batch, fate=self._faults.fate())
        self._next_sequence += 1
        try:
            self._queue.put_nowait(item)
        except queue.Full:
            self._blocked += 1
            self._queue.put(item)

    def restart(self) -> None:
        """Numbers from 0 again with nothing to replay, as a new process on the same ports."""
        self._next_sequence = 0
        self._queue.put(_Restarted())

    def stop(self) -> None:
        """Sends what is queued, ends the thread and closes the sockets."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        encoder = msgspec.msgpack.Encoder()
        try:
            while True:
                self._answer_replay()
                try:
                    item = self._queue.get(timeout=self._wait_s())
                except queue.Empty:
                    self._send_late()
                    continue
                if item is None:
                    return
                if isinstance(item, _Restarted):
                    self._kept.clear()
                    self._late.clear()
                else:
                    self._handle(item.sequence, encoder.encode(item.batch), item.fate)
                self._send_late()
        finally:
            self._publish.close(linger=0)
            if self._replay is not None:
                self._replay.close(linger=0)

    def _wait_s(self) -> float:
        if not self._late:
            return _IDLE_WAIT_S
        return min(_IDLE_WAIT_S, max(0.0, self._late[0][0] - time.monotonic()))

    def _handle(self, sequence: int, payload: bytes, fate: BatchFate) -> None:
        if fate.delay_s or self._late:  # behind a delayed batch nothing may overtake it
            self._late.append((time.monotonic() + fate.delay_s, sequence, payload, fate))
        else:
            self._send(sequence, payload, fate)

    def _send_late(self) -> None:
        while self._late and self._late[0][0] <= time.monotonic():
            _, sequence, payload, fate = self._late.popleft()
            self._send(sequence, payload, fate)

    def _send(self, sequence: int, payload: bytes, fate: BatchFate) -> None:
        for _ in range(fate.copies):
            self._publish.send_multipart((KV_TOPIC, sequence.to_bytes(8, "big"), payload))
        if fate.replayable:
            self._kept.append((sequence, payload))

    def _answer_replay(self) -> None:
        if self._replay is None or not self._replay.poll(0):
            return
        frames = self._replay.recv_multipart()
        if len(frames) != 3:  # SGLang ignores what is no request
            return
        client, _, first = frames
        first_sequence = int.from_bytes(first, "big")
        for sequence, payload in tuple(self._kept):
            if sequence >= first_sequence:
                self._replay.send_multipart((client, b"", KV_TOPIC, sequence.to_bytes(8, "big"), payload))
        self._replay.send_multipart((client, b"", b"", END_OF_REPLAY, b""))
