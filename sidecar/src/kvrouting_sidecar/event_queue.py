"""The buffer between the thread that empties the engine's socket and the loop that reads at its own pace."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class ReceivedBatch:
    """One event batch as it came from the live stream."""

    sequence: int
    payload: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Dropped:
    """Batches are missing here: there was no room for them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NewConnection:
    """What follows came over this connection, perhaps from another engine process."""

    number: int


Received = ReceivedBatch | Dropped | NewConnection


class EventQueue:
    """What one rank published and nobody has read yet, bounded by bytes.

    One thread puts, another takes. Beyond the bound batches are dropped and one mark stands in their place, so
    the putting thread never waits and the engine never feels a slow reader.
    """

    # What a batch costs beside its payload: tuple, integers, bytes header.
    _OVERHEAD_BYTES = 200

    def __init__(self, *, limit_bytes: int, on_arrival: Callable[[], None]) -> None:
        """on_arrival: called from the putting thread when something came in."""
        if limit_bytes < 1:
            raise ValueError(f"limit_bytes {limit_bytes} must be at least 1")
        self._limit_bytes = limit_bytes
        self._on_arrival = on_arrival
        self._items: deque[Received] = deque()
        # Each counter has one writer: the putting thread the first three, the taking one the last.
        self._put_bytes = 0
        self._dropping = False
        self.dropped_batches = 0
        self._taken_bytes = 0

    @property
    def waiting_bytes(self) -> int:
        """Memory of what waits."""
        return self._put_bytes - self._taken_bytes

    def __len__(self) -> int:
        return len(self._items)

    def put(self, batch: ReceivedBatch) -> None:
        """From the reading thread; never waits."""
        size = len(batch.payload) + self._OVERHEAD_BYTES
        if self.waiting_bytes + size > self._limit_bytes:
            self.dropped_batches += 1
            if not self._dropping:
                self._dropping = True
                self._append(Dropped())
            return
        self._dropping = False
        self._put_bytes += size
        self._append(batch)

    def new_connection(self, number: int) -> None:
        """From the reading thread: what it puts from now on came over another connection."""
        self._dropping = False
        self._append(NewConnection(number=number))

    def announce(self) -> None:
        """From the reading thread: something else changed that the taking one waits for."""
        self._on_arrival()

    def peek(self) -> Received | None:
        """The oldest item, which stays; None: nothing waits."""
        return self._items[0] if self._items else None

    def take(self) -> Received:
        """The oldest item. Raises: IndexError if nothing waits."""
        item = self._items.popleft()
        if isinstance(item, ReceivedBatch):
            self._taken_bytes += len(item.payload) + self._OVERHEAD_BYTES
        return item

    def _append(self, item: Received) -> None:
        self._items.append(item)
        self._on_arrival()
