"""A router and a sidecar beside each real server, as processes of their own, and what each of them says."""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from kvrouting_simulator.demo.pool_plan import write_secrets
from kvrouting_simulator.demo.ports import free_ports
from kvrouting_simulator.demo.processes import ManagedProcess, ProcessSpec, stop_all
from tests.engine.real.servers import MODEL_NAME, RealServer
from tests.engine_sockets import ask_state
from tests.processes import generate
from tests.recovery.pool_under_test import Answer, answer_of, digest, routing_blocks

BLOCK_TOKENS = 16
POOL = "real"
VOCABULARY = range(5, 512)
# Three processes of each server share the cores with router, sidecars and tests: what takes milliseconds may take long.
PATIENCE_S = 120.0
_POLL_S = 0.1
_START_LIMIT_S = 60.0


async def eventually(condition: Callable[[], Awaitable[bool]], *, what: Callable[[], object]) -> None:
    """Returns when it holds. what: the present state, for the message. Raises: AssertionError."""
    deadline = time.monotonic() + PATIENCE_S
    while not await condition():
        assert time.monotonic() < deadline, what()
        await asyncio.sleep(_POLL_S)


class RealPool:
    """`async with RealPool({"a": server}, folder=...) as pool`: every worker is live and exact then.

    The worker of rank r of server `a` is `a/r`. environment: of router and sidecars, beside ours.
    """

    def __init__(
        self,
        servers: Mapping[str, RealServer],
        *,
        folder: Path,
        router_options: Sequence[object] = (),
        ranks: int = 1,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.servers = servers
        self.ranks = ranks
        self._secrets = write_secrets(folder)
        self.hash_key = bytes.fromhex(self._secrets.hash_key.read_text())
        http, grpc, *sidecars = free_ports(2 + len(servers), rng=random.Random())
        self.router_url = f"http://127.0.0.1:{http}"
        self._sidecar_ports = dict(zip(servers, sidecars, strict=True))
        shared = {
            "--pool": POOL, "--model": MODEL_NAME, "--block-size": BLOCK_TOKENS,
            "--hash-key-file": self._secrets.hash_key, "--join-token-file": self._secrets.join_token,
        }  # fmt: skip

        def process(name: str, module: str, options: Mapping[str, object], more: Sequence[object]) -> ManagedProcess:
            words = [str(word) for pair in {**shared, **options}.items() for word in pair]
            command = (sys.executable, "-W", "ignore", "-m", module, *words, *map(str, more))
            return ManagedProcess(ProcessSpec(name=name, command=command, environment=environment or {}), folder=folder)

        self.router = process(
            "router", "kvrouting_router", {"--http-port": http, "--grpc-port": grpc, "--seed": 1}, router_options
        )
        self.sidecars = {
            name: process(
                f"sidecar-{name}",
                "kvrouting_sidecar",
                {
                    "--pod-uid": name, "--engine-url": server.url, "--router": f"127.0.0.1:{grpc}",
                    "--state-endpoint": f"tcp://127.0.0.1:{server.ports.state}", "--require-eviction": "rlt",
                    "--gpu-class": "L40", "--http-host": "127.0.0.1", "--http-port": self._sidecar_ports[name],
                },
                (),
            )
            for name, server in servers.items()
        }  # fmt: skip

    async def __aenter__(self) -> RealPool:
        try:
            for process in (self.router, *self.sidecars.values()):
                await process.start()
            for process in (self.router, *self.sidecars.values()):
                await process.wait_for_event("listening", timeout_s=_START_LIMIT_S)
            await self.until_exact()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        """Ends router and sidecars."""
        await stop_all([self.router, *self.sidecars.values()])

    # --- what each part says ---

    async def page(self, url: str) -> Any:
        """A JSON page, whatever its status."""
        timeout = aiohttp.ClientTimeout(total=30)
        async with aiohttp.ClientSession(timeout=timeout) as session, session.get(url) as response:
            return await response.json(content_type=None)

    async def workers(self) -> Mapping[str, Mapping[str, Any]]:
        """What the router believes of each worker."""
        page = await self.page(f"{self.router_url}/workers")
        return {view["worker"]: view for view in page["workers"]}

    async def readiness(self, name: str) -> Mapping[str, Any]:
        """A sidecar's `/readyz`."""
        found: Mapping[str, Any] = await self.page(f"http://127.0.0.1:{self._sidecar_ports[name]}/readyz")
        return found

    async def sidecar_count(self, name: str, metric: str) -> float:
        """The sum of one of a sidecar's metrics over its labels."""
        url = f"http://127.0.0.1:{self._sidecar_ports[name]}/metrics"
        async with aiohttp.ClientSession() as session, session.get(url) as response:
            lines = (await response.text()).splitlines()
        found = [line for line in lines if line.startswith(f"kvrouting_sidecar_{metric}{{")]
        assert found, f"{metric} is not among the metrics"
        return sum(float(line.rpartition(" ")[2]) for line in found)

    async def until_exact(self) -> None:
        """Waits until the router sees each rank live, its mirror exact and proven."""
        wanted = {f"{name}/{rank}" for name in self.servers for rank in range(self.ranks)}
        seen: Mapping[str, Mapping[str, Any]] = {}

        async def all_exact() -> bool:
            nonlocal seen
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                seen = await self.workers()
            proven = {
                name
                for name, view in seen.items()
                if (view["state"], view["mirror"], view["end_to_end_verified"]) == ("live", "exact", True)
            }
            return wanted <= proven

        def shown() -> object:
            return {name: (v["state"], v["mirror"], v["reason"]) for name, v in seen.items()}

        await eventually(all_exact, what=shown)

    async def until_views_equal_engines(self) -> Mapping[str, int]:
        """Waits until the router's view of every rank is that rank's real tree, read node by node. Nothing may run.

        Returns: worker -> routing blocks.
        """
        ours: dict[str, object] = {}
        theirs: dict[str, object] = {}
        blocks: dict[str, int] = {}

        async def equal() -> bool:
            views = await self.workers()
            for name, server in self.servers.items():
                for rank in range(self.ranks):
                    bodies = await ask_state(server.ports.state + rank, "snapshot", seconds=30)
                    events = (event for body in bodies for event in body["events"])
                    held = routing_blocks(events, key=self.hash_key, model=MODEL_NAME, block_tokens=BLOCK_TOKENS)
                    worker = f"{name}/{rank}"
                    view = views.get(worker, {})
                    theirs[worker] = ("live", "exact", len(held), digest(held))
                    ours[worker] = tuple(view.get(field) for field in ("state", "mirror", "blocks", "digest"))
                    blocks[worker] = len(held)
            return ours == theirs

        await eventually(equal, what=lambda: f"router sees {ours}, the engines hold {theirs}")
        return blocks

    async def send(
        self, prompt: Sequence[int], *, output_tokens: int = 4, headers: Mapping[str, str] | None = None
    ) -> Answer:
        """One request through the router; not a stream, so that it may be sent to another worker."""
        sent = time.time()
        got = await generate(
            self.router_url, prompt, output_tokens=output_tokens, stream=False, timeout_s=PATIENCE_S, headers=headers
        )
        return answer_of(got, prompt, sent_unix_s=sent)


class RealLoad:
    """Prompts that share beginnings, all from the seed; together they are more than the caches hold."""

    def __init__(self, *, seed: int, groups: int = 24, shared_tokens: int = 160, own_tokens: int = 40) -> None:
        self._rng = random.Random(seed)
        self._own_tokens = own_tokens
        self._prefixes = [self.fresh_tokens(shared_tokens) for _ in range(groups)]

    def fresh_tokens(self, count: int) -> list[int]:
        """Tokens that no other prompt has in this order."""
        return self._rng.choices(VOCABULARY, k=count)

    def prompt(self) -> list[int]:
        """A group's prefix and an end of its own."""
        return self._rng.choice(self._prefixes) + self.fresh_tokens(self._own_tokens)

    async def through(
        self, pool: RealPool, *, requests: int | None = None, until: asyncio.Event | None = None, clients: int = 6
    ) -> list[Answer]:
        """Each client sends one request after the other, so many in all or until told to end."""
        left = iter(range(requests)) if requests is not None else iter(int, 1)
        answers: list[Answer] = []

        async def client() -> None:
            for _ in left:
                if until is not None and until.is_set():
                    return
                answers.append(await pool.send(self.prompt()))

        async with asyncio.TaskGroup() as running:
            for _ in range(clients):
                running.create_task(client())
        return answers
