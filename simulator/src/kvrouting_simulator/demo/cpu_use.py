"""Processor time of processes, so that a run on a small machine can show that it was not starved."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvrouting_simulator.demo.processes import ManagedProcess


def cpu_s(leader: int) -> float | None:
    """User and system time of a session's living processes; None where the system does not tell, or none lives."""
    found = [used for stat in Path("/proc").glob("[0-9]*/stat") if (used := _cpu_ticks(stat, leader)) is not None]
    return sum(found) / os.sysconf("SC_CLK_TCK") if found else None


def _cpu_ticks(stat: Path, session: int) -> int | None:
    try:
        text = stat.read_text()
    except OSError:  # it has just ended
        return None
    # The name may hold anything; what follows its closing bracket is made of numbers: the session is the 6th value,
    # utime and stime are 14th and 15th.
    values = text.rpartition(")")[2].split()
    return int(values[11]) + int(values[12]) if int(values[3]) == session else None


class CpuMeter:
    """Shares of one core by kind of process since it was made."""

    def __init__(self, groups: Mapping[str, Sequence[ManagedProcess]]) -> None:
        self._groups = groups
        self._start_s = time.monotonic()
        self._own_start_s = time.process_time()
        self._last_s: dict[tuple[str, int], float] = {}
        self._first_s: dict[tuple[str, int], float] = {}
        self.look()
        self._first_s = dict(self._last_s)

    def look(self) -> None:
        """Notes the present times; to be called before a process is ended, or its last stretch is not counted."""
        for group, processes in self._groups.items():
            for process in processes:
                used_s = cpu_s(process.pid) if process.is_running else None
                if used_s is not None:
                    self._last_s[group, process.pid] = used_s

    def percents(self) -> Mapping[str, float]:
        """Percent of one core by group, and `client` for this process; empty where the system does not tell."""
        self.look()
        if not self._last_s:
            return {}
        elapsed_s = time.monotonic() - self._start_s
        shares = dict.fromkeys(self._groups, 0.0)
        for key, used_s in self._last_s.items():
            # A process that came later began with nothing.
            shares[key[0]] += 100 * (used_s - self._first_s.get(key, 0.0)) / elapsed_s
        shares["client"] = 100 * (time.process_time() - self._own_start_s) / elapsed_s
        return shares
