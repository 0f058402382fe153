"""A decision is one object; log line, header, debug page and file show its one JSON form."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import msgspec

from kvrouting_core.routing.decision import Decision

_logger = logging.getLogger(__name__)


# A candidate's JSON is longer than this, so many of them need not be encoded to be known as too long.
_LEAST_CANDIDATE_BYTES = 200


class ShownDecision:
    """A decision and its one JSON form, made when it is first asked for."""

    __slots__ = ("_json", "decision")

    def __init__(self, decision: Decision) -> None:
        self.decision = decision
        self._json: bytes | None = None

    @property
    def json(self) -> bytes:
        """The decision with every candidate's terms: its `as_dict`."""
        if self._json is None:
            self._json = msgspec.json.encode(self.decision.as_dict())
        return self._json

    def header_value(self, *, limit_bytes: int) -> str:
        """The full JSON if it fits into the limit, else the choice alone with `candidates` as a number."""
        decision = self.decision
        if len(decision.candidates) * _LEAST_CANDIDATE_BYTES <= limit_bytes and len(self.json) <= limit_bytes:
            return _as_header(self.json)
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
        return _as_header(msgspec.json.encode(short))


def _as_header(data: bytes) -> str:
    """ASCII: a worker's name may hold anything, a header may not."""
    return data.decode().encode("ascii", "backslashreplace").decode()


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
        self._last: deque[ShownDecision] = deque(maxlen=kept)
        self._log_each = log_each
        self.count = 0

    def add(self, decision: Decision) -> ShownDecision:
        """Records a decision."""
        shown = ShownDecision(decision)
        self.count += 1
        self._last.append(shown)
        if self._log_each:
            _logger.info("decision", extra={"fields": {"decision": msgspec.Raw(shown.json)}})
        return shown

    def page(self, last: int) -> bytes:
        """The last decisions, newest first, as a JSON list."""
        newest = list(self._last)[::-1][:last]
        return b"[" + b",\n".join(shown.json for shown in newest) + b"]"


class DecisionFile:
    """A JSON-lines file of decisions with lengths and outcomes, one line per attempt.

    Lines gather in memory on the event loop; `write` is for a thread, since a disk may be slow.
    """

    def __init__(self, path: Path) -> None:
        self._lines: list[bytes] = []
        self._file: IO[bytes] = path.open("ab")

    def add(self, shown: ShownDecision, lengths: RequestLengths, outcome: RequestOutcome) -> None:
        """One finished attempt."""
        line = {"decision": msgspec.Raw(shown.json), "request": lengths, "outcome": outcome}
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
