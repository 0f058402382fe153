"""How the engines of a pool are started, whatever they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvrouting_simulator.demo.processes import ManagedProcess, ProcessSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class EnginePorts:
    """Of one engine and its sidecar."""

    http: int
    kv_events: int
    replay: int
    load: int
    state: int
    sidecar: int


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSettings:
    """Of all engines of a pool. capacity_tokens: None: the launcher's own. options: further ones of each engine."""

    capacity_tokens: int | None
    page_size: int
    eviction: str
    seed: int
    options: Sequence[str] = ()


class EngineLauncher(Protocol):
    """One kind of engine."""

    @property
    def model(self) -> str:
        """The name under which they serve."""

    @property
    def described(self) -> str:
        """What they are, in a few words for the report."""

    @property
    def start_limit_s(self) -> float:
        """Longer than any start takes on a busy machine."""

    def spec(self, settings: EngineSettings, number: int, ports: EnginePorts) -> ProcessSpec:
        """The process of engine `number`."""

    def sidecar_options(self, settings: EngineSettings, ports: EnginePorts) -> Mapping[str, object]:
        """What an engine's sidecar must be told of it: its class, its state socket, the eviction it must prove."""

    async def wait_ready(self, process: ManagedProcess, ports: EnginePorts) -> None:
        """Returns when it serves. Raises: ProcessFailedError."""
