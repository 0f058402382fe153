"""A pool running on this machine: started, watched, hurt and healed, and ended on every way out."""

from __future__ import annotations

import asyncio
import contextlib
import random
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp

from kvrouting_simulator.demo.engine_launcher import EnginePorts
from kvrouting_simulator.demo.pool_plan import (
    PoolPlan,
    RouterPorts,
    router_spec,
    sidecar_spec,
    worker_id,
    write_secrets,
)
from kvrouting_simulator.demo.ports import free_ports
from kvrouting_simulator.demo.processes import ManagedProcess, stop_all

_START_LIMIT_S = 60.0
_POLL_S = 0.05


class PoolNotLiveError(RuntimeError):
    """The router does not come to see its workers as live; the message holds what it says of them."""


class Cluster:
    """Engines, a sidecar each, and routers. Used as `async with Cluster(...) as pool`: all are live then.

    folder: for the logs. ports are the same through all restarts.
    """

    def __init__(self, plan: PoolPlan, *, folder: Path) -> None:
        self.plan = plan
        self._secrets = tempfile.TemporaryDirectory(prefix="kvrouting-")
        rng = random.Random()  # two pools on one machine must not look for the same ports
        secret_files = write_secrets(Path(self._secrets.name))
        self.hash_key = bytes.fromhex(secret_files.hash_key.read_text())
        ports = list(free_ports(len(fields(EnginePorts)) * plan.engines + 2 * plan.routers, rng=rng))
        self.engine_ports = [_engine_ports(ports) for _ in range(plan.engines)]
        self.router_ports = [RouterPorts(http=ports.pop(), grpc=ports.pop()) for _ in range(plan.routers)]
        self._launcher = plan.starts
        self.engines = [
            ManagedProcess(self._launcher.spec(plan.settings, number, own), folder=folder)
            for number, own in enumerate(self.engine_ports)
        ]
        self.sidecars = [
            ManagedProcess(sidecar_spec(plan, number, own, self.router_ports, secret_files), folder=folder)
            for number, own in enumerate(self.engine_ports)
        ]
        self.routers = [
            ManagedProcess(router_spec(plan, number, own, secret_files), folder=folder)
            for number, own in enumerate(self.router_ports)
        ]
        self._session: aiohttp.ClientSession | None = None

    @property
    def processes(self) -> Sequence[ManagedProcess]:
        """All, engines first."""
        return (*self.engines, *self.sidecars, *self.routers)

    @property
    def router_url(self) -> str:
        """Of the first router."""
        return f"http://127.0.0.1:{self.router_ports[0].http}"

    @property
    def engine_urls(self) -> Sequence[str]:
        """By worker."""
        return [f"http://127.0.0.1:{ports.http}" for ports in self.engine_ports]

    async def __aenter__(self) -> Self:
        try:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5))
            for process in (*self.routers, *self.engines):
                await process.start()
            for number in range(self.plan.engines):
                await self._launcher.wait_ready(self.engines[number], self.engine_ports[number])
            # A sidecar that finds no engine looks again only seconds later.
            for process in self.sidecars:
                await process.start()
            for process in (*self.routers, *self.sidecars):
                await process.wait_for_event("listening", timeout_s=_START_LIMIT_S)
            await self.wait_live(range(self.plan.engines), timeout_s=self._launcher.start_limit_s)
        except BaseException:
            await self._end()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._end()

    async def _end(self) -> None:
        try:
            if self._session is not None:
                await self._session.close()
            # Routers and sidecars first: an engine that ends under them would fill their logs with complaints.
            await stop_all((*self.routers, *self.sidecars))
        finally:
            try:
                await stop_all(self.engines)
            finally:
                self._secrets.cleanup()

    async def watch(self) -> None:
        """Never returns. Raises: ProcessFailedError when any process has ended on its own."""
        while True:
            self._check_running()
            await asyncio.sleep(_POLL_S)

    async def kill_engine(self, number: int) -> None:
        """kill −9, in the midst of whatever it does."""
        await self.engines[number].kill()

    async def restart_engine(self, number: int) -> None:
        """A new engine process at the same ports; returns when it serves."""
        await self.engines[number].start()
        await self._launcher.wait_ready(self.engines[number], self.engine_ports[number])

    async def workers(self, *, router: int = 0) -> Mapping[str, Mapping[str, Any]]:
        """What a router believes of each worker, by worker id. Raises: aiohttp.ClientError, TimeoutError."""
        page = await self.get_json(f"http://127.0.0.1:{self.router_ports[router].http}/workers")
        return {view["worker"]: view for view in page["workers"]}

    async def get_json(self, url: str) -> Any:
        """The body of a page. Raises: aiohttp.ClientError, TimeoutError."""
        if self._session is None:
            raise RuntimeError("the pool was not started")
        async with self._session.get(url) as response:
            response.raise_for_status()
            return await response.json()

    async def wait_live(self, numbers: Collection[int], *, timeout_s: float, router: int = 0) -> None:
        """Returns when a router sees all these workers as live.

        Raises: PoolNotLiveError with its view; ProcessFailedError if a process ends meanwhile.
        """
        wanted = {worker_id(number) for number in numbers}
        seen: Mapping[str, Mapping[str, Any]] = {}
        try:
            async with asyncio.timeout(timeout_s):
                while not wanted <= {name for name, view in seen.items() if view["state"] == "live"}:
                    self._check_running()
                    with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                        seen = await self.workers(router=router)
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            views = "; ".join(f"{name} is {view['state']}: {view['reason']}" for name, view in seen.items())
            raise PoolNotLiveError(
                f"after {timeout_s:g} s the router does not see {', '.join(sorted(wanted))} live "
                f"({views or 'it knows none'})"
            ) from None

    def _check_running(self) -> None:
        for process in self.processes:
            process.check()


def _engine_ports(ports: list[int]) -> EnginePorts:
    return EnginePorts(**{f.name: ports.pop() for f in fields(EnginePorts)})
