"""What a pool on this machine is made of, and the command line of each of its processes. Pure."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvrouting_simulator.bounds import at_least, positive
from kvrouting_simulator.demo.processes import ProcessSpec

POOL_NAME = "local"
MODEL = "simulated-llama"


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolPlan:
    """A pool of simulated engines, a sidecar each, and routers; everything on the loopback.

    capacity_tokens: KV cache of an engine; None: what the worker class holds.
    policy_parameters: of the routing policy, by name. speed: of the engines' clocks.
    engine_options, sidecar_options, router_options: further options of each such process.
    """

    engines: int = 4
    routers: int = 1
    worker_class: str = "L40"
    capacity_tokens: int | None = None
    page_size: int = 1
    block_tokens: int = 64
    eviction: str = "rlt"
    policy: str = "lbgr"
    policy_parameters: Mapping[str, str] = field(default_factory=dict)
    speed: float = 1.0
    seed: int = 1
    engine_options: Sequence[str] = ()
    sidecar_options: Sequence[str] = ()
    router_options: Sequence[str] = ()

    def __post_init__(self) -> None:
        for name in ("engines", "routers"):
            at_least(1, name, getattr(self, name))
        positive("speed", self.speed)


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


def engine_spec(plan: PoolPlan, number: int, ports: EnginePorts) -> ProcessSpec:
    """The engine of worker `number`."""
    options: dict[str, object] = {
        "--port": ports.http,
        "--kv-events-port": ports.kv_events,
        "--replay-port": ports.replay,
        "--load-port": ports.load,
        "--state-port": ports.state,
        "--worker-class": plan.worker_class,
        "--page-size": plan.page_size,
        "--eviction": plan.eviction,
        "--speed": plan.speed,
        "--seed": plan.seed * 1000 + number,
        "--served-model-name": MODEL,
    }
    if plan.capacity_tokens is not None:
        options["--capacity-tokens"] = plan.capacity_tokens
    return ProcessSpec(
        name=f"engine-{number}",
        command=_command("kvrouting_simulator.engine_process", options, plan.engine_options),
    )


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
        "--gpu-class": plan.worker_class,
        "--state-endpoint": f"tcp://127.0.0.1:{ports.state}",
        "--require-eviction": plan.eviction,
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
        "--model": MODEL,
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
