"""Real SGLang servers on the CPU, started as a user starts them and ended with their children."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tests.engine.real.rank_witness import WITNESS_PORT

START_LIMIT_S = 600
CACHE_TOKENS = 2000
MODEL_NAME = "tiny"
TWO_RANKS_ON_A_CPU = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
"""A core for each rank: without it SGLang asks for a NUMA node for each."""

FLAGS = (
    "--device", "cpu", "--load-format", "dummy", "--dtype", "float32", "--attention-backend", "torch_native",
    "--sampling-backend", "pytorch", "--grammar-backend", "none", "--max-running-requests", "8",
    "--context-length", "1024", "--disable-overlap-schedule", "--disable-cuda-graph", "--skip-server-warmup",
    "--enable-metrics", "--enable-cache-report", "--log-level", "info", "--served-model-name", MODEL_NAME,
    "--sleep-on-idle",  # a scheduler that waits would take a core from those that work
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Ports:
    """Where a server's surfaces are; each followed by one port per further rank. witness: of `rank_witness`."""

    http: int
    events: int
    replay: int
    load: int
    state: int
    witness: int


class ServerEndedError(RuntimeError):
    """The server ended instead of getting ready."""


class RealServer:
    """One `sglang.launch_server`, at the same ports through all its starts. log: all that it printed.

    rlt: with the plug-in, told to evict by RLT; else stock unless flags and environment say otherwise.
    events: what differs in `--kv-events-config` from SGLang's defaults; None: no events and no load reports.
    """

    def __init__(
        self,
        model: Path,
        *,
        log: Path,
        page_size: int = 1,
        rlt: bool = True,
        flags: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        events: Mapping[str, Any] | None = MappingProxyType({}),
    ) -> None:
        self._held = HeldPorts()
        self.ports = self._held.ports
        self.log = log
        self.page_size = page_size
        self._command = [
            sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), "--host", "127.0.0.1",
            "--port", str(self.ports.http), "--page-size", str(page_size), "--max-total-tokens", str(CACHE_TOKENS),
            *FLAGS, *(["--radix-cache-backend", "rlt"] if rlt else []), *flags,
        ]  # fmt: skip
        if events is not None:
            self._command += ["--kv-events-config", json.dumps({**self._events_config(), **events})]
            self._command += ["--load-publish-endpoint", f"tcp://*:{self.ports.load}"]
        self._environment = {
            **os.environ,
            "SGLANG_USE_CPU_ENGINE": "1",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "KVROUTING_ENGINE_STATE_ENDPOINT": f"tcp://127.0.0.1:{self.ports.state}",
            WITNESS_PORT: str(self.ports.witness),
            **({"KVROUTING_ENGINE_POLICY": "rlt"} if rlt else {}),
            **(environment or {}),
        }
        self._started: subprocess.Popen[bytes] | None = None

    def start(self) -> RealServer:
        """A new process, once the former one has ended; `wait_until_ready` waits for it."""
        assert self._started is None or self._started.poll() is not None
        self._held.release()
        with self.log.open("ab") as output:
            self._started = subprocess.Popen(
                self._command, env=self._environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
        return self

    @property
    def _process(self) -> subprocess.Popen[bytes]:
        assert self._started is not None, "it was never started"
        return self._started

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.ports.http}"

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_until_ready(self) -> RealServer:
        """Raises: ServerEndedError with the end of its log, TimeoutError."""
        limit = time.monotonic() + START_LIMIT_S
        while time.monotonic() < limit:
            if self._process.poll() is not None:
                raise ServerEndedError(self.log.read_text(errors="replace")[-4000:])
            try:
                self.get("/health")
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)
            else:
                return self
        raise TimeoutError(f"not ready after {START_LIMIT_S} s: {self.log.read_text(errors='replace')[-2000:]}")

    def wait_for_end(self) -> str:
        """For a server that must refuse its setup: its log once it has ended."""
        self._process.wait(timeout=START_LIMIT_S)
        return self.log.read_text(errors="replace")

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(f"{self.url}{path}", timeout=30) as answer:
            body = answer.read()
        return json.loads(body) if body.startswith((b"{", b"[")) else body

    def post(self, path: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> Any:
        request = urllib.request.Request(
            f"{self.url}{path}", json.dumps(body).encode(), {"content-type": "application/json", **(headers or {})}
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            answered = answer.read()
        return json.loads(answered) if answered.startswith((b"{", b"[")) else answered.decode()

    def generate(self, tokens: Sequence[int], *, new_tokens: int = 1) -> tuple[int, int]:
        """(prompt tokens, cached tokens) of one request."""
        body = {"input_ids": list(tokens), "sampling_params": {"max_new_tokens": new_tokens, "temperature": 0}}
        info = self.post("/generate", body)["meta_info"]
        return info["prompt_tokens"], info["cached_tokens"]

    def stop(self) -> None:
        """kill -9 to it and all its processes, if it was started."""
        self._held.release()
        if self._started is None:
            return
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        self._process.wait(timeout=30)

    def _events_config(self) -> dict[str, Any]:
        return {
            "publisher": "zmq",
            "endpoint": f"tcp://127.0.0.1:{self.ports.events}",
            "bind": True,
            "topic": "kv-events",
            "replay_endpoint": f"tcp://127.0.0.1:{self.ports.replay}",
        }


# Below the range from which systems give outgoing connections their ports: a killed server finds its port free again.
_LOWEST, _HIGHEST = 12_000, 30_000
_given: set[int] = set()


class HeldPorts:
    """A free port for each surface, and its successor, which are given to nobody else.

    Held until `release`, so that no other process finds them free; after that a server binds its own only much later.
    """

    def __init__(self) -> None:
        self._held: list[socket.socket] = []
        rng = random.Random()  # two test runs must not look for the same ports
        self.ports = Ports(**{field.name: self._pair(rng) for field in fields(Ports)})

    def release(self) -> None:
        for held in self._held:
            held.close()
        self._held.clear()

    def _pair(self, rng: random.Random) -> int:
        while True:
            port = rng.randrange(_LOWEST, _HIGHEST, 2)
            if port in _given:
                continue
            pair = [bound for bound in map(_bound, (port, port + 1)) if bound is not None]
            if len(pair) == 2:
                _given.add(port)
                self._held += pair
                return port
            for bound in pair:
                bound.close()


def _bound(port: int) -> socket.socket | None:
    """None where somebody has it."""
    bound = socket.socket()
    try:
        bound.bind(("127.0.0.1", port))
    except OSError:
        bound.close()
        return None
    return bound
