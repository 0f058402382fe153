"""Logs as JSON lines on stderr, written by a thread: a full pipe never stops the event loop."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from logging.handlers import QueueHandler, QueueListener
from queue import SimpleQueue

import msgspec


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


class _Queueing(QueueHandler):
    """Hands records over as they are: formatting them here would mix fields and text."""

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        """The record itself; it does not leave the process."""
        return record


@contextmanager
def json_logging(level: str) -> Iterator[None]:
    """Logs of the whole process go to stderr as JSON lines until the context ends.

    level: debug, info, warning or error.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    records: SimpleQueue[logging.LogRecord] = SimpleQueue()
    listener = QueueListener(records, handler)
    root = logging.getLogger()
    queueing = _Queueing(records)
    root.addHandler(queueing)
    root.setLevel(level.upper())
    listener.start()
    try:
        yield
    finally:
        root.removeHandler(queueing)
        listener.stop()
