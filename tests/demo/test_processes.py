"""Child processes: started, ended, frozen, seen failing, and never left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from kvrouting_simulator.demo.cpu_use import cpu_s
from kvrouting_simulator.demo.processes import ManagedProcess, ProcessFailedError, ProcessSpec, stop_all

READY = 'import sys, time; print(\'{"event": "listening", "http": 5}\', file=sys.stderr, flush=True); '


def managed(tmp_path: Path, code: str, *, name: str = "child") -> ManagedProcess:
    return ManagedProcess(ProcessSpec(name=name, command=[sys.executable, "-c", code]), folder=tmp_path)


async def test_a_process_says_when_it_is_ready_and_ends_when_it_is_asked_to(tmp_path: Path) -> None:
    process = managed(tmp_path, READY + "time.sleep(600)")
    await process.start()
    assert await process.wait_for_event("listening", timeout_s=30) == {"event": "listening", "http": 5}
    assert psutil.pid_exists(process.pid)
    process.check()
    await process.stop()
    process.check()
    assert not psutil.pid_exists(process.pid)
    assert process.exit_code == -signal.SIGTERM


async def test_a_deaf_process_is_killed_after_the_grace(tmp_path: Path) -> None:
    process = managed(tmp_path, "import signal; signal.signal(15, signal.SIG_IGN); " + READY + "time.sleep(600)")
    await process.start()
    await process.wait_for_event("listening", timeout_s=30)
    await process.stop(grace_s=0.2)
    assert process.exit_code == -signal.SIGKILL


async def test_a_frozen_process_can_be_ended(tmp_path: Path) -> None:
    process = managed(tmp_path, READY + "time.sleep(600)")
    await process.start()
    await process.wait_for_event("listening", timeout_s=30)
    process.freeze()
    while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
        await asyncio.sleep(0.01)
    await process.stop()
    assert process.exit_code == -signal.SIGTERM


async def test_a_killed_process_starts_again_and_only_its_new_words_count(tmp_path: Path) -> None:
    process = managed(tmp_path, READY + "time.sleep(600)")
    await process.start()
    await process.wait_for_event("listening", timeout_s=30)
    first = process.pid
    with pytest.raises(RuntimeError, match="runs already"):
        await process.start()
    await process.kill()
    assert process.exit_code == -signal.SIGKILL
    with pytest.raises(ProcessFailedError):
        await process.wait_for_event("no such event", timeout_s=5)
    await process.start()
    await process.wait_for_event("listening", timeout_s=30)
    assert process.pid != first
    assert process.log_path.read_text().count("listening") == 2
    await process.stop()


async def test_a_process_that_fails_shows_its_command_and_the_end_of_its_log(tmp_path: Path) -> None:
    process = managed(tmp_path, "import sys; print('no room for port 7', file=sys.stderr); sys.exit(3)")
    await process.start()
    with pytest.raises(ProcessFailedError) as caught:
        await process.wait_for_event("listening", timeout_s=30)
    message = str(caught.value)
    assert "child ended with exit code 3 before it was ready" in message
    assert "no room for port 7" in message
    assert "sys.exit(3)" in message
    assert str(process.log_path) in message


async def test_a_process_that_ends_on_its_own_is_a_failure(tmp_path: Path) -> None:
    process = managed(tmp_path, READY + "time.sleep(0.05); sys.exit(4)")
    await process.start()
    while process.is_running:
        await asyncio.sleep(0.01)
    with pytest.raises(ProcessFailedError, match="ended on its own with exit code 4"):
        process.check()


async def test_a_process_that_is_never_ready_is_a_failure(tmp_path: Path) -> None:
    process = managed(tmp_path, "import time; time.sleep(600)")
    await process.start()
    with pytest.raises(ProcessFailedError, match=r"no event 'listening' within 0\.1 s"):
        await process.wait_for_event("listening", timeout_s=0.1)
    await process.stop()


async def test_all_end_together_even_when_the_wait_is_interrupted(tmp_path: Path) -> None:
    deaf = "import signal; signal.signal(15, signal.SIG_IGN); " + READY + "time.sleep(600)"
    processes = [managed(tmp_path, deaf, name=f"p{n}") for n in range(3)]
    for process in processes:
        await process.start()
    for process in processes:
        await process.wait_for_event("listening", timeout_s=30)
    ending = asyncio.create_task(stop_all(processes, grace_s=600))
    await asyncio.sleep(0.05)
    ending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await ending
    assert not any(process.is_running for process in processes)


# A process with a child of its own that works for a moment, as engines of several processes have.
WITH_CHILD = (
    "import subprocess, sys, time; "
    "c = subprocess.Popen([sys.executable, '-c', 'sum(range(10**7)); import time; time.sleep(600)']); "
    'print(\'{"event": "listening", "child": %d}\' % c.pid, file=sys.stderr, flush=True); time.sleep(600)'
)


@pytest.mark.parametrize("way", ["kill", "stop"])
async def test_the_children_of_a_process_freeze_count_and_end_with_it(tmp_path: Path, way: str) -> None:
    process = managed(tmp_path, WITH_CHILD)
    await process.start()
    number = (await process.wait_for_event("listening", timeout_s=30))["child"]
    assert isinstance(number, int)
    child = psutil.Process(number)
    process.freeze()
    while child.status() != psutil.STATUS_STOPPED:
        await asyncio.sleep(0.01)
    process.resume()
    while child.cpu_times().user == 0:
        await asyncio.sleep(0.01)
    used_s = cpu_s(process.pid)
    assert used_s is not None
    assert used_s >= psutil.Process(process.pid).cpu_times().user
    await (process.kill() if way == "kill" else process.stop())
    psutil.wait_procs([child], timeout=30)
    assert not child.is_running()


async def test_a_condition_is_waited_for_as_long_as_the_process_lives(tmp_path: Path) -> None:
    process = managed(tmp_path, "import time; time.sleep(0.3); raise SystemExit(3)")
    await process.start()
    looks = iter([None, None, "there"])

    async def look() -> str | None:
        return next(looks)

    async def never() -> str | None:
        return None

    assert await process.wait_until(look, what="was not there", timeout_s=30) == "there"
    with pytest.raises(ProcessFailedError, match="ended with exit code 3 before it was ready"):
        await process.wait_until(never, what="was not there", timeout_s=30)


async def test_a_long_line_of_a_log_is_shown_by_its_begin(tmp_path: Path) -> None:
    process = managed(tmp_path, "import sys; print('x' * 9000, file=sys.stderr); sys.exit(3)")
    await process.start()
    with pytest.raises(ProcessFailedError) as caught:
        await process.wait_for_event("listening", timeout_s=30)
    assert "x" * 300 + " ..." in str(caught.value)
    assert len(str(caught.value)) < 1000


@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child of its parent's death")
def test_children_end_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    code = f"""
import asyncio, sys
from pathlib import Path
from kvrouting_simulator.demo.processes import ManagedProcess, ProcessSpec
async def main():
    child = ManagedProcess(
        ProcessSpec(name="child", command=[sys.executable, "-c", {READY + "time.sleep(600)"!r}]),
        folder=Path({str(tmp_path)!r}),
    )
    await child.start()
    await child.wait_for_event("listening", timeout_s=30)
    print(child.pid, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait(30)
    psutil.wait_procs([child], timeout=30)
    assert not child.is_running()


async def test_a_killed_process_is_not_missed_while_it_is_started_again(tmp_path: Path) -> None:
    process = managed(tmp_path, "import time; time.sleep(60)")
    await process.start()
    await process.kill()
    restart = asyncio.create_task(process.start())
    while not restart.done():
        process.check()
        await asyncio.sleep(0)
    process.check()
    await process.kill()
