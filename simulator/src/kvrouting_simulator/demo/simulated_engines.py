"""Simulated engines, as processes."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass

from kvrouting_simulator.demo.engine_launcher import EnginePorts, EngineSettings
from kvrouting_simulator.demo.processes import ManagedProcess, ProcessSpec

MODEL = "simulated-llama"


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedEngines:
    """Each is a `kvrouting engine`. worker_class: whose times and, by default, whose cache it has."""

    worker_class: str
    speed: float = 1.0
    model: str = MODEL
    start_limit_s: float = 60.0

    @property
    def described(self) -> str:
        """Their class."""
        return f"simulated {self.worker_class}"

    def spec(self, settings: EngineSettings, number: int, ports: EnginePorts) -> ProcessSpec:
        """The process of engine `number`."""
        options: dict[str, object] = {
            "--port": ports.http,
            "--kv-events-port": ports.kv_events,
            "--replay-port": ports.replay,
            "--load-port": ports.load,
            "--state-port": ports.state,
            "--worker-class": self.worker_class,
            "--page-size": settings.page_size,
            "--eviction": settings.eviction,
            "--speed": self.speed,
            "--seed": settings.seed * 1000 + number,
            "--served-model-name": self.model,
        }
        if settings.capacity_tokens is not None:
            options["--capacity-tokens"] = settings.capacity_tokens
        words = [word for name, value in options.items() for word in (name, str(value))]
        return ProcessSpec(
            name=f"engine-{number}",
            command=(sys.executable, "-m", "kvrouting_simulator.engine_process", *words, *settings.options),
        )

    def sidecar_options(self, settings: EngineSettings, ports: EnginePorts) -> Mapping[str, object]:
        """The state socket, and the policy that it must prove; an engine that was told to have none proves nothing."""
        options: dict[str, object] = {
            "--gpu-class": self.worker_class,
            "--state-endpoint": f"tcp://127.0.0.1:{ports.state}",
        }
        if "--no-state" not in settings.options:
            options["--require-eviction"] = settings.eviction
        return options

    async def wait_ready(self, process: ManagedProcess, ports: EnginePorts) -> None:  # noqa: ARG002 (it says so itself)
        """Returns when it listens. Raises: ProcessFailedError."""
        await process.wait_for_event("listening", timeout_s=self.start_limit_s)
