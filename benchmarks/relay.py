"""CPU time of the router's relay per request, against a bare aiohttp relay that decides nothing.

Real processes on the loopback: one plays four engines by script, each relay is a process of its own, and in each round
every relay serves the same requests, in turn. What is counted is the CPU time of the relay's process alone, so that
neither the scripted engines nor the load generator can hide or add anything; requests/s per core is its inverse.

    python -m benchmarks.relay [--quick] [--sglang-router PYTHON] [--router-option OPTION]... [--only CASE]

PYTHON is an interpreter that has the package sglang-router; its router is then measured in the same rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import uvloop

from benchmarks._texts import Writer, write_tokenizer

ENGINES = 4
BASELINE = "bare aiohttp relay"
ROUTER = "kvrouting router"
_START_LIMIT_S = 60.0
_BATCH_LIMIT_S = 60.0
_LAST_CHUNK = b"\r\n0\r\n\r\n"


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """What is asked. unit: what the CPU time is divided by; units: how many of them one request has."""

    name: str
    connections: int
    script: str
    unit: str
    units: int
    prompt: Callable[[Writer, int], Sequence[Mapping[str, str]]]
    requests: int

    @property
    def events(self) -> int:
        """Of each answer."""
        return int(self.script.replace("*", "/").partition("/")[0])


@dataclass(slots=True)
class Subject:
    """A relay's process and what it cost. costs_us: CPU time per unit of each round, by case."""

    name: str
    process: subprocess.Popen[bytes]
    port: int
    costs_us: dict[str, list[float]] = field(default_factory=dict)

    def cpu_s(self) -> float:
        """User and system time so far, children included."""
        root = psutil.Process(self.process.pid)
        times = [p.cpu_times() for p in (root, *root.children(recursive=True))]
        return sum(t.user + t.system for t in times)


def short_prompt(writer: Writer, number: int) -> Sequence[Mapping[str, str]]:
    """One of sixteen system prompts and a question of its own."""
    system = Writer(1000 + number % 16).text(240)
    return [{"role": "system", "content": system}, {"role": "user", "content": writer.text(120)}]


def long_prompt(writer: Writer, number: int) -> Sequence[Mapping[str, str]]:
    """32 kB, of which nine tenths were sent before."""
    document = Writer(1000 + number % 16).text(29_000)
    return [{"role": "user", "content": document}, {"role": "user", "content": writer.text(3_000)}]


def cases(*, quick: bool) -> list[Case]:
    """The three situations."""
    short, long, events = (192, 64, 50) if quick else (512, 192, 150)
    return [
        Case(name="short streaming chats, 32 connections", connections=32, script="8/1", unit="request", units=1,
             prompt=short_prompt, requests=short),
        Case(name="32 kB prompts, 32 connections", connections=32, script="8/1", unit="request", units=1,
             prompt=long_prompt, requests=long),
        Case(name="64 streams, 1 event per 10 ms", connections=64, script=f"{events}*10", unit="event", units=events,
             prompt=short_prompt, requests=64),
    ]  # fmt: skip


def request_bytes(case: Case, writer: Writer, number: int) -> bytes:
    """One request as it goes over the wire."""
    messages = [*case.prompt(writer, number), {"role": "user", "content": f"[{case.script}]"}]
    body = {"model": "m", "messages": messages, "stream": True, "max_tokens": 64}
    data = json.dumps(body).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: router\r\nContent-Type: application/json\r\n"
        f"Accept: text/event-stream\r\nUser-Agent: benchmark\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


async def connection(port: int, queue: Iterator[bytes], events: int) -> None:
    """Sends requests one after the other. Raises: RuntimeError for an answer that has not so many events."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    try:
        for request in queue:
            writer.write(request)
            answer = await reader.readuntil(_LAST_CHUNK)
            if not answer.startswith(b"HTTP/1.1 200") or answer.count(b"data: {") != events:
                raise RuntimeError(f"port {port} answered {answer[:300]!r}")
    finally:
        writer.close()


async def play(port: int, requests: Sequence[bytes], case: Case) -> None:
    """Sends all requests over the connections of the case."""
    queue = iter(requests)
    async with asyncio.timeout(_BATCH_LIMIT_S), asyncio.TaskGroup() as tasks:
        for _ in range(case.connections):
            tasks.create_task(connection(port, queue, case.events))


async def measure(case: Case, subjects: Sequence[Subject], rounds: int) -> None:
    """Every round asks each relay the same, beginning with another one each time; the first is not counted."""
    writer = Writer(7)
    for number in range(rounds + 1):
        requests = [request_bytes(case, writer, number * case.requests + i) for i in range(case.requests)]
        shift = number % len(subjects)
        for subject in (*subjects[shift:], *subjects[:shift]):
            before_s = subject.cpu_s()
            await play(subject.port, requests, case)
            cost_us = (subject.cpu_s() - before_s) * 1e6 / (len(requests) * case.units)
            if number:
                subject.costs_us.setdefault(case.name, []).append(cost_us)


def report(case: Case, subjects: Sequence[Subject]) -> None:
    """One line per relay; ratios are medians of the rounds' ratios."""
    baseline = next(s for s in subjects if s.name == BASELINE).costs_us[case.name]
    peer = next((s.costs_us[case.name] for s in subjects if "cache_aware" in s.name), None)
    print(f"\n{case.name}")
    heads = f"{'CPU µs/' + case.unit:>15} {case.unit + 's/s/core':>16} {'to ' + BASELINE:>22}"
    print(f"  {'relay':<30} {heads}" + (f" {'rate to cache_aware':>20}" if peer else ""))
    for subject in subjects:
        costs = subject.costs_us[case.name]
        cost_us = statistics.median(costs)
        line = f"  {subject.name:<30} {cost_us:>15.0f} {1e6 / cost_us:>16.0f} {_ratio(costs, baseline):>22.2f}"
        print(line + (f" {_ratio(peer, costs):>20.2f}" if peer else ""), flush=True)


def _ratio(costs: Sequence[float], others: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(costs, others, strict=True))


@contextlib.contextmanager
def process(command: Sequence[str], *, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A child process, ended with the context. Its output goes to `log`."""
    with log.open("wb") as output:
        child = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        yield child
    finally:
        child.terminate()
        try:
            child.wait(10)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def announced(child: subprocess.Popen[bytes], log: Path, read: Callable[[dict[str, object]], object]) -> object:
    """What a process says of itself in its first JSON line for which `read` gives something."""
    deadline_s = time.monotonic() + _START_LIMIT_S
    while time.monotonic() < deadline_s and child.poll() is None:
        for line in log.read_text().splitlines():
            if line.startswith("{") and line.endswith("}") and (found := read(json.loads(line))):
                return found
        time.sleep(0.05)
    raise RuntimeError(f"a process did not start; its output:\n{log.read_text()}")


def free_port() -> int:
    """A port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Relays:
    """Starts what is to be measured; everything ends with the stack."""

    def __init__(self, stack: contextlib.ExitStack, folder: Path) -> None:
        self._stack = stack
        self._folder = folder
        self.subjects: list[Subject] = []
        ports = self._ports("engines", [sys.executable, "-m", "benchmarks._scripted_engine", str(ENGINES)])
        self._urls = [f"http://127.0.0.1:{port}" for port in ports[1]]

    def _start(self, name: str, command: Sequence[str]) -> tuple[subprocess.Popen[bytes], Path]:
        log = self._folder / f"{name}.log"
        return self._stack.enter_context(process(command, log=log)), log

    def _ports(self, name: str, command: Sequence[str]) -> tuple[subprocess.Popen[bytes], list[int]]:
        child, log = self._start(name, command)
        ports = announced(child, log, lambda line: line.get("ports"))
        assert isinstance(ports, list)
        return child, ports

    def bare(self) -> None:
        """The baseline."""
        child, ports = self._ports("bare", [sys.executable, "-m", "benchmarks._bare_relay", *self._urls])
        self.subjects.append(Subject(BASELINE, child, ports[0]))

    def router(self, options: Sequence[str]) -> None:
        """Ours, with a tokenizer and the defaults of its command."""
        tokenizer = write_tokenizer(self._folder / "tokenizer")
        workers = [part for url in self._urls for part in ("--worker", url)]
        command = [
            sys.executable, "-m", "kvrouting_router", "--model", "m", "--http-port", "0", "--grpc-port", "0",
            "--tokenizer", str(tokenizer), *workers, *options,
        ]  # fmt: skip
        child, log = self._start("router", command)
        port = announced(child, log, lambda line: line.get("http"))
        assert isinstance(port, int)
        self.subjects.append(Subject(ROUTER, child, port))

    def sglang_router(self, python: str, policy: str) -> None:
        """The peer, from another environment."""
        port = free_port()
        command = [
            python, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port), "--policy", policy,
            "--prometheus-port", str(free_port()), "--log-level", "warn", "--worker-urls", *self._urls,
        ]  # fmt: skip
        child, _ = self._start(f"sglang-{policy}", command)
        self.subjects.append(Subject(f"sglang-router {policy}", child, port))

    async def ready(self) -> None:
        """Waits until every relay serves."""
        case = cases(quick=True)[0]
        request = request_bytes(case, Writer(0), 0)
        deadline_s = time.monotonic() + _START_LIMIT_S
        for subject in self.subjects:
            while True:
                try:
                    async with asyncio.timeout(5):
                        await connection(subject.port, iter([request]), case.events)
                    break
                except (OSError, RuntimeError, EOFError) as error:  # a timeout is an OSError
                    if time.monotonic() > deadline_s:
                        raise RuntimeError(f"{subject.name} does not serve") from error
                await asyncio.sleep(0.2)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer and shorter rounds")
    parser.add_argument(
        "--sglang-router",
        metavar="PYTHON",
        default=os.environ.get("KVROUTING_BENCH_SGLANG_ROUTER"),
        help="interpreter with the package sglang-router; also KVROUTING_BENCH_SGLANG_ROUTER",
    )
    parser.add_argument("--router-option", action="append", default=[], help="passed to the router; may be repeated")
    parser.add_argument("--only", metavar="CASE", default="", help="cases whose name begins so")
    return parser.parse_args()  # fmt: skip


async def run(given: argparse.Namespace) -> None:
    """Starts everything, measures each case and prints it."""
    rounds = 4 if given.quick else 10
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        relays = Relays(stack, folder)
        relays.bare()
        relays.router(given.router_option)
        if given.sglang_router:
            for policy in ("cache_aware", "round_robin"):
                relays.sglang_router(given.sglang_router, policy)
        await relays.ready()
        for case in cases(quick=given.quick):
            if case.name.startswith(given.only):
                await measure(case, relays.subjects, rounds)
                report(case, relays.subjects)


def main() -> None:
    """Prints CPU time and ratios of each case."""
    uvloop.run(run(arguments()))


if __name__ == "__main__":
    main()
