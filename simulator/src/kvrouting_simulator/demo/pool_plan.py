"""What a pool on this machine is made of, and the command line of each of its processes. Pure."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvrouting_core.eviction import DEFAULT_POLICY
from kvrouting_simulator.bounds import at_least, positive
from kvrouting_simulator.demo.engine_launcher import EngineLauncher, EnginePorts, EngineSettings
from kvrouting_simulator.demo.processes import ProcessSpec
from kvrouting_simulator.demo.simulated_engines import MODEL as MODEL  # also the name that tests ask for
from kvrouting_simulator.demo.simulated_engines import SimulatedEngines

POOL_NAME = "local"


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolPlan:
    """A pool of engines, a sidecar each, and routers; everything on the loopback.

    launcher: starts the engines; None: simulated ones of `worker_class` whose clocks run at `speed`.
    capacity_tokens: KV cache of an engine; None: what the worker class holds.
    policy_parameters: of the routing policy, by name.
    engine_options, sidecar_options, router_options: further options of each such process.
    """

    engines: int = 4
    routers: int = 1
    worker_class: str = "L40"
    capacity_tokens: int | None = None
    page_size: int = 1
    block_tokens: int = 64
    eviction: str = DEFAULT_POLICY
    policy: str = "lbgr"
    policy_parameters: Mapping[str, str] = field(default_factory=dict)
    speed: float = 1.0
    launcher: EngineLauncher | None = None
    seed: int = 1
    engine_options: Sequence[str] = ()
    sidecar_options: Sequence[str] = ()
    router_options: Sequence[str] = ()

    def __post_init__(self) -> None:
        for name in ("engines", "routers"):
            at_least(1, name, getattr(self, name))
        positive("speed", self.speed)

    @property
    def starts(self) -> EngineLauncher:
        """Who starts the engines."""
        return self.launcher or SimulatedEngines(worker_class=self.worker_class, speed=self.speed)

    @property
    def settings(self) -> EngineSettings:
        """What all its engines have in common."""
        return EngineSettings(
            capacity_tokens=self.capacity_tokens,
            page_size=self.page_size,
            eviction=self.eviction,
            seed=self.seed,
            options=self.engine_options,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterPorts:
    """Of one router."""

    http: int
    grpc: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SecretFiles:
    """What the members of a pool share: files, so that no command line shows it."""

    hash_key: Path
    join_token: Path


def write_secrets(folder: Path) -> SecretFiles:
    """New random secrets, readable by their owner alone."""
    files = SecretFiles(hash_key=folder / "hash-key", join_token=folder / "join-token")
    for path, secret in ((files.hash_key, secrets.token_hex(32)), (files.join_token, secrets.token_urlsafe(32))):
        path.touch(mode=0o600)
        path.write_text(secret)
    return files


def worker_name(number: int) -> str:
    """Pod uid of the worker; its routing target is this + `/0`."""
    return f"w{number}"


def worker_id(number: int) -> str:
    """Routing target of the worker, as decisions and `/workers` name it."""
    return f"{worker_name(number)}/0"


def sidecar_spec(
    plan: PoolPlan, number: int, ports: EnginePorts, routers: Sequence[RouterPorts], secret_files: SecretFiles
) -> ProcessSpec:
    """The sidecar of worker `number`; it streams to every router."""
    options: dict[str, object] = {
        "--pool": POOL_NAME,
        "--pod-uid": worker_name(number),
        "--engine-url": f"http://127.0.0.1:{ports.http}",
        "--block-size": plan.block_tokens,
        "--hash-key-file": secret_files.hash_key,
        "--join-token-file": secret_files.join_token,
        **plan.starts.sidecar_options(plan.settings, ports),
        "--http-host": "127.0.0.1",
        "--http-port": ports.sidecar,
    }
    named = [word for router in routers for word in ("--router", f"127.0.0.1:{router.grpc}")]
    return ProcessSpec(
        name=f"sidecar-{number}",
        command=_command("kvrouting_sidecar", options, (*named, *plan.sidecar_options)),
    )


def router_spec(plan: PoolPlan, number: int, ports: RouterPorts, secret_files: SecretFiles) -> ProcessSpec:
    """Router replica `number`."""
    options: dict[str, object] = {
        "--model": plan.starts.model,
        "--pool": POOL_NAME,
        "--block-size": plan.block_tokens,
        "--http-port": ports.http,
        "--grpc-port": ports.grpc,
        "--hash-key-file": secret_files.hash_key,
        "--join-token-file": secret_files.join_token,
        "--policy": plan.policy,
        "--seed": plan.seed,
    }
    parameters = [
        word for name, value in plan.policy_parameters.items() for word in ("--policy-parameter", f"{name}={value}")
    ]
    return ProcessSpec(
        name=f"router-{number}",
        command=_command("kvrouting_router", options, (*parameters, "--no-log-decisions", *plan.router_options)),
    )


def _command(module: str, options: Mapping[str, object], more: Sequence[str]) -> Sequence[str]:
    words = [word for name, value in options.items() for word in (name, str(value))]
    return (sys.executable, "-m", module, *words, *more)
