"""Load as SGLang publishes it: a gauge on a PUB socket, at once when it changes, else once a second.

Frames `[b"load", sequence (8 bytes, big-endian), msgpack LoadStat]`.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import zmq

LOAD_TOPIC = b"load"
HEARTBEAT_S = 1.0
LOAD_HIGH_WATER_MARK = 8
# Every decode step changes the token count: what changed only there waits for so long.
_TOKENS_INTERVAL_S = 0.1


class LoadStat(msgspec.Struct, array_like=True, gc=False, tag=True, frozen=True):
    """The array `["LoadStat", running, waiting, …]`: SGLang's positions, all always there.

    total_prefill_busy_us: in real time, so that its ratio to the uncached tokens is the speed that a router sees.
    """

    num_running_reqs: int
    num_waiting_reqs: int
    num_tokens: int
    max_total_num_tokens: int
    attn_dp_rank: int | None
    num_waiting_uncached_tokens: int
    num_total_tokens: int
    max_running_requests: int
    total_prefill_uncached_tokens: int
    total_prefill_busy_us: int


class LoadPublisher:
    """Publishes one rank's load. `offer` is called at every step boundary, `beat` by a timer."""

    def __init__(self, publish: zmq.Socket[bytes], *, monotonic_s: Callable[[], float]) -> None:
        """publish: a bound PUB socket, closed by `stop`."""
        self._publish = publish
        self._monotonic_s = monotonic_s
        self._encode = msgspec.msgpack.Encoder().encode
        self._sequence = 0
        self._sent: LoadStat | None = None
        self._sent_s = 0.0

    def offer(self, load: LoadStat) -> None:
        """Sends a changed load: at once if the counts of requests changed, else at most ten times a second."""
        if load == self._sent:
            return
        requests_changed = self._sent is None or _requests(load) != _requests(self._sent)
        if requests_changed or self._monotonic_s() - self._sent_s >= _TOKENS_INTERVAL_S:
            self._send(load)

    def beat(self, load: LoadStat) -> None:
        """Sends the load unless one was sent within the heartbeat and nothing changed since."""
        if load != self._sent or self._monotonic_s() - self._sent_s >= HEARTBEAT_S:
            self._send(load)

    def stop(self) -> None:
        """Closes the socket."""
        self._publish.close(linger=0)

    def _send(self, load: LoadStat) -> None:
        # A PUB socket never blocks: beyond its high-water mark it sheds, and the next heartbeat supersedes.
        self._publish.send_multipart((LOAD_TOPIC, self._sequence.to_bytes(8, "big"), self._encode(load)))
        self._sequence += 1
        self._sent, self._sent_s = load, self._monotonic_s()


def _requests(load: LoadStat) -> tuple[int, int]:
    return load.num_running_reqs, load.num_waiting_reqs
