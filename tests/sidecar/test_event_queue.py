"""The buffer behind the engine's socket: it never waits, and never forgets that it dropped."""

from __future__ import annotations

import pytest

from kvrouting_sidecar.event_queue import Dropped, EventQueue, NewConnection, ReceivedBatch


def _batch(sequence: int, size: int = 800) -> ReceivedBatch:
    return ReceivedBatch(sequence=sequence, payload=b"x" * size)


def test_beyond_its_bound_it_drops_and_marks_the_gap_once() -> None:
    queue = EventQueue(limit_bytes=3000, on_arrival=lambda: None)
    for sequence in range(10):
        queue.put(_batch(sequence))
    assert queue.waiting_bytes <= 3000
    assert queue.dropped_batches == 7
    taken = [queue.take() for _ in range(len(queue))]
    assert taken[:3] == [_batch(0), _batch(1), _batch(2)]
    assert taken[3:] == [Dropped()]


def test_it_takes_again_as_soon_as_there_is_room() -> None:
    queue = EventQueue(limit_bytes=1500, on_arrival=lambda: None)
    for sequence in range(3):
        queue.put(_batch(sequence))
    queue.take()
    queue.put(_batch(3))
    queue.put(_batch(4))
    kinds = [type(queue.take()).__name__ for _ in range(len(queue))]
    assert kinds == ["Dropped", "ReceivedBatch", "Dropped"]
    assert queue.waiting_bytes == 0


def test_it_tells_of_every_arrival_and_of_a_new_connection() -> None:
    arrivals: list[int] = []
    queue = EventQueue(limit_bytes=10_000, on_arrival=lambda: arrivals.append(1))
    queue.put(_batch(0))
    queue.new_connection(2)
    queue.announce()
    assert len(arrivals) == 3
    assert queue.peek() == queue.take()
    assert queue.take() == NewConnection(number=2)
    assert queue.peek() is None


def test_a_bound_below_one_byte_is_refused() -> None:
    with pytest.raises(ValueError, match="limit_bytes 0"):
        EventQueue(limit_bytes=0, on_arrival=lambda: None)
