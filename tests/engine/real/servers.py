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
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

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
    """Where a server's surfaces are; each followed by one port per further data-parallel rank."""

    http: int
    events: int
    replay: int
    load: int
    state: int


class ServerEndedError(RuntimeError):
    """The server ended instead of getting ready."""


class RealServer:
    """One `sglang.launch_server`, at the same ports through all its starts. log: everything it printed.

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
        self.ports = free_ports()
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
            **(environment or {}),
        }
        self._process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as output:
            return subprocess.Popen(
                self._command, env=self._environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )

    def start_again(self) -> None:
        """A new process at the same ports, once the former one has ended; `wait_until_ready` waits for it."""
        assert self._process.poll() is not None
        self._process = self._start()

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
        """kill -9 to it and all its processes."""
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


def free_ports() -> Ports:
    """Five ports with a free successor each, which are given to nobody else: a server binds its own only much later."""
    rng = random.Random()  # two test runs must not look for the same ports
    found: list[int] = []
    while len(found) < 5:
        port = rng.randrange(_LOWEST, _HIGHEST, 2)
        if port not in _given and _is_free(port) and _is_free(port + 1):
            found.append(port)
            _given.add(port)
    return Ports(http=found[0], events=found[1], replay=found[2], load=found[3], state=found[4])


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
