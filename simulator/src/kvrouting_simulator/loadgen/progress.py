"""How far a run is: a bar in a terminal, a line now and then elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvrouting_simulator.report import RequestRecord

_LINE_EVERY_S = 10.0


class ProgressView(Protocol):
    """Told of every record as it comes."""

    def add(self, record: RequestRecord) -> None:
        """One request ended."""


class _Tally:
    """Counts for the line of text: ended, failed, hit rate so far."""

    def __init__(self) -> None:
        self.ended = 0
        self._failed = 0
        self._prompt_tokens = 0
        self._cached_tokens = 0

    def add(self, record: RequestRecord) -> None:
        self.ended += 1
        if not record.completed:
            self._failed += 1
            return
        self._prompt_tokens += record.prompt_tokens
        self._cached_tokens += record.cached_tokens

    def __str__(self) -> str:
        hit = 100 * self._cached_tokens / self._prompt_tokens if self._prompt_tokens else 0.0
        return f"hit rate {hit:.1f} %, {self._failed} failed"


class _Bar:
    def __init__(self, progress: Progress, title: str, total: int | None) -> None:
        self._progress = progress
        self._tally = _Tally()
        self._task = progress.add_task(title, total=total, said="")

    def add(self, record: RequestRecord) -> None:
        self._tally.add(record)
        self._progress.update(self._task, advance=1, said=str(self._tally))


class _Lines:
    def __init__(self, console: Console, title: str, total: int | None, monotonic_s: Callable[[], float]) -> None:
        self._console = console
        self._title = title
        self._of = "" if total is None else f" of {total}"
        self._monotonic_s = monotonic_s
        self._next_s = monotonic_s() + _LINE_EVERY_S
        self._tally = _Tally()

    def add(self, record: RequestRecord) -> None:
        self._tally.add(record)
        if self._monotonic_s() >= self._next_s:
            self._next_s += _LINE_EVERY_S
            self.say()

    def say(self) -> None:
        self._console.print(f"{self._title}: {self._tally.ended}{self._of} requests ended, {self._tally}")


@contextmanager
def progress_view(
    console: Console, title: str, *, total: int | None, monotonic_s: Callable[[], float]
) -> Iterator[ProgressView]:
    """A view for one run. total: requests expected, None if that is not known."""
    if not console.is_terminal:
        lines = _Lines(console, title, total, monotonic_s)
        yield lines
        lines.say()
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.fields[said]}"), console=console) as progress:
        yield _Bar(progress, title, total)
