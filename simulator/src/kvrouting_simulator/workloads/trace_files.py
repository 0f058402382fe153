"""Opening and parsing published traces; a bad line is named with its file, number and value."""

from __future__ import annotations

import csv
import gzip
import json
import lzma
import math
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TextIO


class TraceError(ValueError):
    """A trace, or a line of it, that cannot be used. line: counts from 1; None: the whole file is meant."""

    def __init__(self, path: Path, line: int | None, problem: str) -> None:
        super().__init__(f"{path}: {problem}" if line is None else f"{path}:{line}: {problem}")


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceCall:
    """One request of a trace with prefix identity.

    hash_ids: one per block, the last may be partial or, in formats that leave it out, missing; each stands for its
    block and all before it. suite, session, turn: "" and 0 in formats without sessions.
    """

    timestamp_ms: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...]
    suite: str = ""
    session: str = ""
    turn: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthRow:
    """One request of a trace that has lengths and no content."""

    timestamp_ms: float
    input_tokens: int
    output_tokens: int


@contextmanager
def open_trace(path: Path) -> Iterator[TextIO]:
    """A text file, decompressed by its ending: .xz, .gz, or plain.

    Raises: TraceError if it holds something else; OSError if it cannot be opened.
    """
    try:
        with _opened(path) as file:
            yield file
    except (UnicodeDecodeError, csv.Error) as error:
        problem = f"this is no text in UTF-8 ({error}): the name of a compressed trace must end with .xz or .gz"
        raise TraceError(path, None, problem) from error
    except (lzma.LZMAError, gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise TraceError(path, None, f"cannot be decompressed as its ending {path.suffix} says ({error})") from error


def _opened(path: Path) -> TextIO:
    if path.suffix == ".xz":
        return lzma.open(path, "rt", encoding="utf-8")
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8")
    return path.open(encoding="utf-8")


def read_mooncake(path: Path, *, block_tokens: int = 512, requests: int | None = None) -> list[TraceCall]:
    """The first `requests` lines (None: all) of a Mooncake trace: timestamp, input_length, output_length, hash_ids.

    Raises: TraceError for a line that is no such object, goes back in time, or has not as many ids as blocks, and for a
    file without lines.
    """
    calls: list[TraceCall] = []
    for number, row in _json_lines(path, requests):
        line = _Line(path, number, row)
        call = _call(line, "timestamp", block_tokens)
        if calls and call.timestamp_ms < calls[-1].timestamp_ms:
            raise line.error(f"timestamp {call.timestamp_ms} is before {calls[-1].timestamp_ms}")
        calls.append(call)
    return calls


def read_agent_sessions(path: Path, *, block_tokens: int = 16, requests: int | None = None) -> list[TraceCall]:
    """Calls of agents: suite, session, turn, timestamp_ms since the session's start, and the rest as in Mooncake's.

    Raises: TraceError as `read_mooncake`; but times need not ascend, and some are negative.
    """
    calls = []
    for number, row in _json_lines(path, requests):
        line = _Line(path, number, row)
        calls.append(
            _call(
                line,
                "timestamp_ms",
                block_tokens,
                suite=line.text("suite"),
                session=line.text("session"),
                turn=line.whole("turn", 0),
            )
        )
    return calls


def read_azure(path: Path, *, requests: int | None = None) -> list[LengthRow]:
    """Rows of Azure's public LLM traces: TIMESTAMP, ContextTokens, GeneratedTokens. Times count from the first row.

    Raises: TraceError for a missing column, a value that cannot be read, a row that goes back in time, or no row.
    """
    rows: list[LengthRow] = []
    start: datetime | None = None
    with open_trace(path) as file:
        reader = csv.DictReader(file)
        if reader.fieldnames is None:
            raise _empty(path)
        missing = {"TIMESTAMP", "ContextTokens", "GeneratedTokens"} - set(reader.fieldnames)
        if missing:
            raise TraceError(
                path,
                1,
                f"no column {', '.join(sorted(missing))}; found {', '.join(reader.fieldnames) or 'a blank line'}",
            )
        for row in reader:
            if len(rows) == requests:
                break
            line = _Line(path, reader.line_num, row)
            time = line.moment("TIMESTAMP")
            start = start or time
            since_ms = (time - start).total_seconds() * 1000
            if rows and since_ms < rows[-1].timestamp_ms:
                raise line.error(f"TIMESTAMP {row['TIMESTAMP']} is before that of the row above")
            rows.append(
                LengthRow(
                    timestamp_ms=since_ms,
                    input_tokens=line.whole("ContextTokens", 0),
                    output_tokens=line.whole("GeneratedTokens", 0),
                )
            )
    if not rows:
        raise TraceError(path, None, "there is no row below its heading")
    return rows


def _empty(path: Path) -> TraceError:
    return TraceError(path, None, "the file is empty")


def _json_lines(path: Path, limit: int | None) -> Iterator[tuple[int, Mapping[str, object]]]:
    taken = 0
    with open_trace(path) as file:
        for number, text in enumerate(file, 1):
            if not text.strip():
                continue
            if taken == limit:
                return
            taken += 1
            try:
                row = json.loads(text)
            except json.JSONDecodeError as error:
                raise TraceError(path, number, f"not JSON ({error}): {text.strip()[:80]!r}") from None
            if not isinstance(row, dict):
                raise TraceError(path, number, f"not an object: {text.strip()[:80]!r}")
            yield number, row
    if not taken:
        raise _empty(path)


def _call(
    line: _Line, time_name: str, block_tokens: int, *, suite: str = "", session: str = "", turn: int = 0
) -> TraceCall:
    input_tokens = line.whole("input_length", 0)
    hash_ids = line.ids("hash_ids")
    whole, partial = divmod(input_tokens, block_tokens)
    if len(hash_ids) not in (whole, whole + bool(partial)):
        raise line.error(
            f"{len(hash_ids)} hash_ids for input_length {input_tokens}: blocks of {block_tokens} make {whole}"
            + (f" or {whole + 1}" if partial else "")
        )
    return TraceCall(
        timestamp_ms=line.number(time_name),
        input_tokens=input_tokens,
        output_tokens=line.whole("output_length", 0),
        hash_ids=hash_ids,
        suite=suite,
        session=session,
        turn=turn,
    )


class _Line:
    """Values of one line, checked."""

    def __init__(self, path: Path, number: int, row: Mapping[str, object]) -> None:
        self._path = path
        self._number = number
        self._row = row

    def error(self, problem: str) -> TraceError:
        return TraceError(self._path, self._number, problem)

    def text(self, name: str) -> str:
        value = self._get(name)
        if not isinstance(value, str):
            raise self.error(f"{name} must be a text, got {value!r}")
        return value

    def whole(self, name: str, least: int) -> int:
        value = self._get(name)
        if isinstance(value, str) and value.strip().isdecimal():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self.error(f"{name} must be a whole number of at least {least}, got {value!r}")
        return value

    def number(self, name: str) -> float:
        value = self._get(name)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
            raise self.error(f"{name} must be a number, got {value!r}")
        return float(value)

    def ids(self, name: str) -> tuple[int, ...]:
        value = self._get(name)
        if not isinstance(value, list):
            raise self.error(f"{name} must be a list, got {value!r}")
        for item in value:
            if not isinstance(item, int) or isinstance(item, bool) or not 0 <= item < 2**47:
                raise self.error(f"{name} must hold whole numbers from 0 to 2^47, got {item!r}")
        return tuple(value)

    def moment(self, name: str) -> datetime:
        value = self._get(name)
        try:
            return datetime.fromisoformat(str(value))
        except ValueError:
            raise self.error(f"{name} must be a date and time, got {value!r}") from None

    def _get(self, name: str) -> object:
        value = self._row.get(name)
        if value is None:
            raise self.error(f"{name} is missing")
        return value
