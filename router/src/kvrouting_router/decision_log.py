"""A decision is one object; log line, header, debug page and file show its one JSON form."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import msgspec

from kvrouting_core.routing.decision import Decision

_logger = logging.getLogger(__name__)


def decision_json(decision: Decision) -> bytes:
    """The decision with every candidate's terms; the same as its `as_dict`."""
    return msgspec.json.encode(decision)


def header_value(decision: Decision, full: bytes, *, limit_bytes: int) -> str:
    """The full JSON if it fits into the limit, else the choice alone with `candidates` as a number."""
    if len(full) <= limit_bytes:
        return full.decode("ascii", "backslashreplace")
    chosen = decision.chosen
    short = {
        "request_id": decision.request_id,
        "policy": decision.policy,
        "worker": decision.worker,
        "reason": decision.reason.value,
        "waited_ms": decision.waited_ms,
        "prompt_tokens": decision.prompt_tokens,
        "matched_tokens": chosen.matched_tokens,
        "prediction_ms": chosen.prediction_ms,
        "candidates": len(decision.candidates),
    }
    return msgspec.json.encode(short).decode("ascii", "backslashreplace")


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestOutcome:
    """How a decision turned out. Times are ms from the request's arrival; None: it never came so far."""

    outcome: str
    attempt: int
    first_byte_ms: float | None
    end_ms: float
    output_tokens: int | None
    cached_tokens: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestLengths:
    """What was asked for, so that a decision can be replayed."""

    api: str
    arrived_ms: float
    prompt_tokens: int
    further_prompt_tokens: int
    sequences: int
    max_output_tokens: int | None
    exact: bool
    stream: bool


class DecisionLog:
    """Keeps the last decisions, and tells each one to the log."""

    def __init__(self, *, kept: int, log_each: bool) -> None:
        self._last: deque[tuple[Decision, bytes]] = deque(maxlen=kept)
        self._log_each = log_each
        self._listeners: list[Callable[[Decision, bytes], None]] = []
        self.count = 0

    def add(self, decision: Decision) -> bytes:
        """Records a decision. Returns: its JSON."""
        full = decision_json(decision)
        self.count += 1
        self._last.append((decision, full))
        if self._log_each:
            _logger.info("decision", extra={"fields": {"decision": msgspec.Raw(full)}})
        return full

    def page(self, last: int) -> bytes:
        """The last decisions, newest first, as a JSON list."""
        newest = list(self._last)[::-1][:last]
        return b"[" + b",\n".join(full for _, full in newest) + b"]"

    def last(self) -> Decision | None:
        """The newest decision."""
        return self._last[-1][0] if self._last else None


class DecisionFile:
    """A JSON-lines file of decisions with lengths and outcomes, one line per attempt.

    Lines gather in memory on the event loop; `write` is for a thread, since a disk may be slow.
    """

    def __init__(self, path: Path) -> None:
        self._lines: list[bytes] = []
        self._file: IO[bytes] = path.open("ab")

    def add(self, full: bytes, lengths: RequestLengths, outcome: RequestOutcome) -> None:
        """One finished attempt."""
        line = {"decision": msgspec.Raw(full), "request": lengths, "outcome": outcome}
        self._lines.append(msgspec.json.encode(line) + b"\n")

    def take(self) -> list[bytes]:
        """Hands out what has gathered, to be written."""
        lines, self._lines = self._lines, []
        return lines

    def write(self, lines: list[bytes]) -> None:
        """Appends the lines to the file."""
        if lines:
            self._file.write(b"".join(lines))
            self._file.flush()

    def close(self) -> None:
        """Writes the rest and closes the file."""
        self.write(self.take())
        self._file.close()
