"""Logs as JSON lines on stderr, written by a thread: a full pipe never stops the event loop."""

from __future__ import annotations

import logging
import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

import msgspec

_GATHERED_S = 0.05


class JsonFormatter(logging.Formatter):
    """Constant text as `event`, fields apart: `logger.info("text", extra={"fields": {...}})`."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        line: dict[str, object] = {
            "ts": round(record.created, 6),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
        }
        line.update(getattr(record, "fields", {}))
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        elif record.exc_text:
            line["exception"] = record.exc_text
        return msgspec.json.encode(line, enc_hook=str).decode()


class _Gatherer(logging.Handler):
    """Takes records at once and writes them a moment later, many with one call.

    A thread that is woken for each record costs the event loop more than the record is worth.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream
        self._records: deque[logging.LogRecord] = deque()
        self._begun = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Hands the record over as it is: the thread formats it."""
        self._records.append(record)
        if not self._begun.is_set():
            self._begun.set()

    def close(self) -> None:
        """Writes what is left and ends the thread."""
        self._stopping.set()
        self._begun.set()
        self._thread.join()
        super().close()

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._begun.wait()
            self._stopping.wait(_GATHERED_S)
            self._begun.clear()
            self._write()
        self._write()

    def _write(self) -> None:
        lines = []
        while self._records:
            record = self._records.popleft()
            try:
                lines.append(self.format(record) + "\n")
            except (TypeError, ValueError):
                self.handleError(record)
        if not lines:
            return
        try:
            self._stream.write("".join(lines))
            self._stream.flush()
        except OSError:
            return  # nobody reads the log any more; there is nowhere to say so


@contextmanager
def json_logging(level: str) -> Iterator[None]:
    """Logs of the whole process go to stderr as JSON lines until the context ends.

    level: debug, info, warning or error.
    """
    gatherer = _Gatherer(sys.stderr)
    gatherer.setFormatter(JsonFormatter())
    root = logging.getLogger()
    root.addHandler(gatherer)
    root.setLevel(level.upper())
    try:
        yield
    finally:
        root.removeHandler(gatherer)
        gatherer.close()
