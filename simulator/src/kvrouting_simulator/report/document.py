"""A report as a value: one or more runs, saved as JSON with every record and read back without loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from kvrouting_simulator.report.records import PoolMark, RequestRecord
from kvrouting_simulator.report.summary import Summary

FORMAT = "kvrouting-report/1"


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One run of one workload against one pool.

    name: short, unique within a report, the column's heading: `lbgr + rlt`.
    parameters: everything that made the run what it is, by name.
    notes: sentences that a reader must know before trusting the figures.
    """

    name: str
    parameters: Mapping[str, str | int | float | bool | None]
    records: tuple[RequestRecord, ...]
    summary: Summary
    marks: tuple[PoolMark, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def failures(self) -> Mapping[str, int]:
        """Of each kind of failure: the first error in full, and how many there are."""
        first: dict[str, str] = {}
        for record in self.records:
            if record.error_kind is not None and record.error is not None:
                first.setdefault(record.error_kind, record.error)
        return {first.get(kind, kind): count for kind, count in self.summary.failures.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """Runs that are to be read side by side; ratios are against the first.

    pairs: names of two runs whose figures ought to agree: measured and expected. An expected run is shown beside
        its measured one, not among the runs that are compared.
    Raises: ValueError if two runs have one name, there is none, or a pair names one that is not there.
    """

    title: str
    runs: tuple[Run, ...]
    introduction: tuple[str, ...] = ()
    pairs: tuple[tuple[str, str], ...] = ()
    format: str = FORMAT

    def __post_init__(self) -> None:
        if self.format != FORMAT:
            raise ValueError(f"format {self.format!r} is not {FORMAT!r}: written by another version")
        if not self.runs:
            raise ValueError("a report needs at least one run")
        names = [run.name for run in self.runs]
        if len(set(names)) != len(names):
            raise ValueError(f"two runs have one name: {', '.join(names)}")
        for name in (name for pair in self.pairs for name in pair):
            if name not in names:
                raise ValueError(f"no run is named {name!r}; there are: {', '.join(names)}")

    @property
    def compared(self) -> tuple[Run, ...]:
        """The runs that are compared with one another: all but the expected ones of the pairs."""
        expected = {name for _, name in self.pairs}
        return tuple(run for run in self.runs if run.name not in expected) or self.runs

    def run(self, name: str) -> Run:
        """The run of that name. Raises: KeyError if there is none."""
        for run in self.runs:
            if run.name == name:
                return run
        raise KeyError(name)


class ReportUnreadableError(ValueError):
    """A file is not a report of this version."""


def save_report(report: Report, path: Path) -> None:
    """Writes JSON; the folder is made if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")


def load_report(path: Path) -> Report:
    """Reads what `save_report` wrote. Raises: ReportUnreadableError naming the file and what is wrong."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Report)
    except msgspec.MsgspecError as error:
        raise ReportUnreadableError(f"{path} is no saved report: {error}") from error


def join_reports(title: str, reports: Sequence[Report], *, labels: Sequence[str]) -> Report:
    """All runs of several reports in one, without pairs; a name that comes twice gets its report's label."""
    taken: set[str] = set()
    runs: list[Run] = []
    for label, report in zip(labels, reports, strict=True):
        for run in report.runs:
            name = run.name if run.name not in taken else f"{label}: {run.name}"
            while name in taken:
                name += "'"
            taken.add(name)
            runs.append(replace(run, name=name))
    introduction = tuple(dict.fromkeys(line for report in reports for line in report.introduction))
    return Report(title=title, runs=tuple(runs), introduction=introduction)
