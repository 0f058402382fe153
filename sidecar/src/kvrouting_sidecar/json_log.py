"""One JSON object a line on standard error: constant text under `event`, fields beside it."""

from __future__ import annotations

import json
import logging
import sys
from typing import TextIO

# What logging itself puts on a record; everything else came in through `extra`.
_OWN_FIELDS = frozenset(vars(logging.LogRecord("", 0, "", 0, "", (), None))) | {"message", "asctime", "taskName"}


class JsonLines(logging.Formatter):
    """A record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        """Fields of `extra` that JSON does not know are written as text."""
        line = {
            "ts": round(record.created, 6),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
        }
        line |= {name: value for name, value in vars(record).items() if name not in _OWN_FIELDS}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def log_to(stream: TextIO = sys.stderr, *, level: str = "INFO") -> None:
    """Write all records of this process there."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
