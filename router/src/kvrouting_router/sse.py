"""Server-sent events as bytes: whole events go on at once, an incomplete one waits for its rest."""

from __future__ import annotations

from collections import deque

# An "event" beyond this is no event stream that anybody means; it is passed on as it comes.
_LONGEST_EVENT_BYTES = 1 << 20
_KEPT_PIECES = 3
# With the line ends after it; the whole piece need not be looked through.
_LONGEST_END_MARK_BYTES = 24
# OpenAI's usage is the last event, SGLang's is in every one.
_USAGE_WITHIN = 2


class EventSplitter:
    """Cuts a stream after its last complete event.

    Nothing is changed or reordered. What is held back is useless to the client anyway, and holding it back is what
    allows to end a broken stream with an error event: an event that was begun cannot be taken back.
    """

    def __init__(self) -> None:
        self._held = b""
        self._last: deque[bytes] = deque(maxlen=_KEPT_PIECES)

    def feed(self, chunk: bytes) -> bytes:
        """The next bytes. Returns: what may be sent now; empty while an event is incomplete."""
        data = self._held + chunk if self._held else chunk
        end = _end_of_last_event(data)
        if not end and len(data) > _LONGEST_EVENT_BYTES:
            end = len(data)
        self._held = data[end:]
        ready = data if end == len(data) else data[:end]
        if ready:
            self._last.append(ready)
        return ready

    def rest(self) -> bytes:
        """What is left when the stream has ended properly."""
        rest, self._held = self._held, b""
        if rest:
            self._last.append(rest)
        return rest

    @property
    def has_end_mark(self) -> bool:
        """Whether the last of what may be sent is the final [DONE]: the answer is complete, whatever comes after."""
        return bool(self._last) and self._last[-1][-_LONGEST_END_MARK_BYTES:].rstrip().endswith(b"data: [DONE]")

    def last_payloads(self) -> list[bytes]:
        """The JSON payloads of the last two events, newest first, without the final [DONE]."""
        lines = b"".join(self._last).splitlines()
        payloads: list[bytes] = []
        for line in reversed(lines):
            if line.startswith(b"data:") and not line.endswith(b"[DONE]"):
                payloads.append(line[5:].strip())
                if len(payloads) == _USAGE_WITHIN:
                    break
        return payloads


def _end_of_last_event(data: bytes) -> int:
    """Length of the whole events in front; 0 if there is none."""
    if data.endswith(b"\n\n"):
        return len(data)
    end = max(data.rfind(b"\n\n") + 2, data.rfind(b"\n\r\n") + 3)
    return end if end > 2 else 0
