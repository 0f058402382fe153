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
    """Shares of one core by kind of process since it was made. A process that restarts counts with its last life."""

    def __init__(self, groups: Mapping[str, Sequence[ManagedProcess]]) -> None:
        self._groups = groups
        self._start_s = time.monotonic()
        self._own_start_s = time.process_time()
        self._before = {name: self._total_s(processes) for name, processes in groups.items()}

    def percents(self) -> Mapping[str, float]:
        """Percent of one core by group, and `client` for this process; empty where the system does not tell."""
        elapsed_s = time.monotonic() - self._start_s
        shares: dict[str, float] = {}
        for name, processes in self._groups.items():
            before, now = self._before[name], self._total_s(processes)
            if before is None or now is None:
                return {}
            shares[name] = 100 * (now - before) / elapsed_s
        shares["client"] = 100 * (time.process_time() - self._own_start_s) / elapsed_s
        return shares

    @staticmethod
    def _total_s(processes: Sequence[ManagedProcess]) -> float | None:
        times = [cpu_s(process.pid) for process in processes if process.is_running]
        return None if any(t is None for t in times) else sum(t for t in times if t is not None)
