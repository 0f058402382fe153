"""A child process with a log of its own that never outlives its parent."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TypeVar

# Runs before the real command and becomes it: when the parent dies, however it dies, the kernel ends the child too.
# A parent that is gone before the call is noticed by its changed id. Other systems than Linux have no such call.
_TIE_TO_PARENT = (
    "import ctypes, os, sys\n"
    "ctypes.CDLL(None).prctl(1, 9)\n"
    "os.getppid() == int(sys.argv[1]) or sys.exit(1)\n"
    "os.execvp(sys.argv[2], sys.argv[2:])\n"
)
_TAIL_LINES = 25
_TAIL_COLUMNS = 300  # some servers log all their settings in one line
_POLL_S = 0.02

Found = TypeVar("Found")


class ProcessFailedError(RuntimeError):
    """A process ended on its own or did not become ready; the message holds its command and the end of its log."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessSpec:
    """What to run. name: unique in its cluster, also the name of the log file. environment: added to ours."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def shown_command(self) -> str:
        """As one would type it; the added environment is left out, it may hold secrets."""
        return shlex.join(self.command)


class ManagedProcess:
    """One process that can be started, killed, stopped, continued and started again; its log grows through all that.

    It leads a session of its own, and its children end, freeze and go on with it. folder: holds the log `<name>.log`.
    """

    def __init__(self, spec: ProcessSpec, *, folder: Path) -> None:
        self.spec = spec
        self.log_path = folder / f"{spec.name}.log"
        self._process: asyncio.subprocess.Process | None = None
        self._read_from = 0
        self._expected_to_end = False

    @property
    def pid(self) -> int:
        """Raises: RuntimeError if it was never started."""
        return self._running().pid

    @property
    def is_running(self) -> bool:
        """Started and not ended."""
        return self._process is not None and self._process.returncode is None

    @property
    def exit_code(self) -> int | None:
        """Of the last start; negative: ended by that signal; None while it runs or before it is started."""
        return None if self._process is None else self._process.returncode

    async def start(self) -> None:
        """Starts it, again if it has ended. Raises: RuntimeError if it runs."""
        if self.is_running:
            raise RuntimeError(f"{self.spec.name} runs already (pid {self.pid})")
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        # A new object is a new story: the log of an earlier run would only mislead.
        with self.log_path.open("wb" if self._process is None else "ab") as log:
            self._read_from = log.tell()
            self._process = await self._spawn(log)
        self._expected_to_end = False  # not before: until then a check still looks at the process that was killed

    async def _spawn(self, log: IO[bytes]) -> asyncio.subprocess.Process:
        command = list(self.spec.command)
        if sys.platform == "linux":
            command = [sys.executable, "-ISc", _TIE_TO_PARENT, str(os.getpid()), *command]
        return await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, **self.spec.environment},
            start_new_session=True,  # an interrupt at the terminal is for the parent, which then ends all in order
        )

    async def wait_for_event(self, event: str, *, timeout_s: float) -> Mapping[str, object]:
        """The fields of the first line with that event that it logged since its last start.

        Raises: ProcessFailedError if it ends before, or says nothing of it in time.
        """

        async def logged() -> Mapping[str, object] | None:
            return self._logged(event)

        return await self.wait_until(logged, what=f"logged no event {event!r}", timeout_s=timeout_s)

    async def wait_until(self, seen: Callable[[], Awaitable[Found | None]], *, what: str, timeout_s: float) -> Found:
        """What `seen` finds, which is asked again and again. what: the complaint, if it finds nothing in time.

        Raises: ProcessFailedError if the process ends before, or nothing is found in time.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while (found := await seen()) is None:
                    if not self.is_running:
                        raise self._failure(f"ended with exit code {self.exit_code} before it was ready")
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            raise self._failure(f"{what} within {timeout_s:g} s") from None
        return found

    def _logged(self, event: str) -> Mapping[str, object] | None:
        with self.log_path.open("rb") as log:
            log.seek(self._read_from)
            for line in log:
                if line.startswith(b"{") and event.encode() in line:
                    fields = _fields(line)
                    if fields is not None and fields.get("event") == event:
                        return fields
        return None

    def check(self) -> None:
        """Raises: ProcessFailedError if it has ended on its own."""
        if self.exit_code is not None and not self._expected_to_end:
            raise self._failure(f"ended on its own with exit code {self.exit_code}")

    async def kill(self) -> None:
        """kill −9: it gets no chance to say goodbye. Returns when it is gone."""
        await self._end_with(signal.SIGKILL)

    async def stop(self, *, grace_s: float = 10.0) -> None:
        """Asks it to end, and kills it when the grace is over. Does nothing if it does not run."""
        if not self.is_running:
            return
        self.resume()
        try:
            async with asyncio.timeout(grace_s):
                await self._end_with(signal.SIGTERM)
        except TimeoutError:
            await self.kill()

    async def _end_with(self, number: signal.Signals) -> None:
        process = self._running()
        self._expected_to_end = True
        if number is signal.SIGTERM:
            process.terminate()  # its children are its own to end
        else:
            self._signal(number)
        await process.wait()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # children that it left behind

    def freeze(self) -> None:
        """SIGSTOP: it holds its connections and does nothing."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT: it goes on where it was frozen."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        if self.is_running:
            os.killpg(self._running().pid, number)

    def _running(self) -> asyncio.subprocess.Process:
        if self._process is None:
            raise RuntimeError(f"{self.spec.name} was never started")
        return self._process

    def log_tail(self, lines: int = _TAIL_LINES) -> str:
        """The end of its log."""
        if not self.log_path.exists():
            return ""
        last = self.log_path.read_text(errors="replace").splitlines()[-lines:]
        return "\n".join(line if len(line) <= _TAIL_COLUMNS else f"{line[:_TAIL_COLUMNS]} ..." for line in last)

    def _failure(self, what: str) -> ProcessFailedError:
        return ProcessFailedError(
            f"{self.spec.name} {what}\n  command: {self.spec.shown_command}\n"
            f"  log: {self.log_path}, which ends with\n{self.log_tail()}"
        )


def _fields(line: bytes) -> Mapping[str, object] | None:
    try:
        fields = json.loads(line)
    except ValueError:  # half a line: the rest is on its way
        return None
    return fields if isinstance(fields, dict) else None


async def stop_all(processes: Sequence[ManagedProcess], *, grace_s: float = 10.0) -> None:
    """Ends them all at once; returns when none runs, even if the wait is interrupted."""
    try:
        await asyncio.gather(*(process.stop(grace_s=grace_s) for process in processes))
    finally:
        for process in processes:
            if process.is_running:
                await asyncio.shield(process.kill())
