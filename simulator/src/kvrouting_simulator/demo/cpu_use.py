"""Processor time of processes, so that a run on a small machine can show that it was not starved."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvrouting_simulator.demo.processes import ManagedProcess


def cpu_s(pid: int) -> float | None:
    """User and system time of a process; None where the system does not tell, or the process is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The name may hold anything; what follows its closing bracket is made of numbers: utime and stime are 14th, 15th.
    values = stat.rpartition(")")[2].split()
    return (int(values[11]) + int(values[12])) / os.sysconf("SC_CLK_TCK")


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
