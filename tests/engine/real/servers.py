"""Real SGLang servers on the CPU, started as a user starts them and ended with their children."""

from __future__ import annotations

import json
import os
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
from typing import Any

START_LIMIT_S = 300
CACHE_TOKENS = 2000

FLAGS = (
    "--device", "cpu", "--load-format", "dummy", "--dtype", "float32", "--attention-backend", "torch_native",
    "--sampling-backend", "pytorch", "--grammar-backend", "none", "--max-running-requests", "8",
    "--context-length", "1024", "--disable-overlap-schedule", "--disable-cuda-graph", "--skip-server-warmup",
    "--enable-metrics", "--enable-cache-report", "--log-level", "info",
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
    """One `sglang.launch_server`. log: everything it printed."""

    def __init__(
        self,
        model: Path,
        *,
        log: Path,
        page_size: int = 1,
        rlt: bool = True,
        flags: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        events: bool = True,
    ) -> None:
        self.ports = free_ports()
        self.log = log
        command = [
            sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), "--host", "127.0.0.1",
            "--port", str(self.ports.http), "--page-size", str(page_size), "--max-total-tokens", str(CACHE_TOKENS),
            *FLAGS, *(["--radix-cache-backend", "rlt"] if rlt else []), *flags,
        ]  # fmt: skip
        if events:
            command += ["--kv-events-config", json.dumps(self._events_config())]
            command += ["--load-publish-endpoint", f"tcp://*:{self.ports.load}"]
        given = {
            **os.environ,
            "SGLANG_USE_CPU_ENGINE": "1",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "KVROUTING_ENGINE_STATE_ENDPOINT": f"tcp://127.0.0.1:{self.ports.state}",
            **(environment or {}),
        }
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command, env=given, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )

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
        """Ends it with all its processes."""
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


def free_ports() -> Ports:
    """Five ports with a free successor each."""
    found: list[int] = []
    while len(found) < 5:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
            if port > 60_000 or any(abs(port - other) < 4 for other in found):
                continue
            try:
                second.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            found.append(port)
    return Ports(http=found[0], events=found[1], replay=found[2], load=found[3], state=found[4])
