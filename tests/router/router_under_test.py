"""A router in the test's own process, on free ports, with engines and sidecars that are fakes."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from kvrouting_core.blocks import ChainHasher, Namespace
from kvrouting_router.engine_probe import StaticWorker
from kvrouting_router.options import BreakerOptions, RouterOptions, RoutingOptions, SyncOptions, TimeLimits
from kvrouting_router.router_process import PolicyFactory, Router, RouterConfig
from kvrouting_router.tracing import NoTracer, Tracer
from kvrouting_tokenization import ByteTokenizer
from tests.fakes.fake_http_engine import FakeHttpEngine
from tests.fakes.fake_sidecar import FakeSidecar, hello

KEY = b"k" * 32
BLOCK = 16
HASHER = ChainHasher(KEY, BLOCK)
MODEL = "m"
# Generous: only a test that fails ever waits so long, and a busy machine may take seconds for what takes none.
PATIENCE_S = 30.0


def blocks_of(tokens: Iterable[int], **namespace: str) -> list[int]:
    """The hashes that router and sidecar share."""
    hashes: list[int] = HASHER.hash_blocks(Namespace(model=MODEL, **namespace), list(tokens)).tolist()
    return hashes


def text_blocks(text: str, **namespace: str) -> list[int]:
    """Hashes of a completion prompt under the byte tokenizer."""
    return blocks_of(ByteTokenizer().encode_prompt(text), **namespace)


def chat(content: str = "hi", **fields: Any) -> dict[str, Any]:
    """A chat request."""
    return {"model": MODEL, "messages": [{"role": "user", "content": content}], **fields}


@dataclass
class RouterUnderTest:
    """The router, a client for it, and what belongs to it."""

    router: Router
    session: aiohttp.ClientSession
    sidecars: list[FakeSidecar] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.router.http_port}"

    @property
    def grpc_target(self) -> str:
        return f"127.0.0.1:{self.router.grpc_port}"

    async def post(self, path: str, body: Any, **options: Any) -> tuple[int, Any, dict[str, str]]:
        """Status, JSON (or bytes) and headers of a whole answer."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"} | options.pop("headers", {})
        async with self.session.post(self.url + path, data=io.BytesIO(data), headers=headers, **options) as response:
            raw = await response.read()
            try:
                value = json.loads(raw)
            except ValueError:
                value = raw
            return response.status, value, {k.lower(): v for k, v in response.headers.items()}

    async def get(self, path: str, **options: Any) -> tuple[int, str]:
        """Status and text."""
        async with self.session.get(self.url + path, **options) as response:
            return response.status, await response.text()

    async def workers(self) -> dict[str, Any]:
        """The page of all workers."""
        status, text = await self.get("/workers")
        assert status == 200
        page: dict[str, Any] = json.loads(text)
        return page

    async def worker(self, name: str = "pod-a/0") -> dict[str, Any]:
        """One worker's entry."""
        page = await self.workers()
        found: dict[str, Any] = next(w for w in page["workers"] if w["worker"] == name)
        return found

    async def nothing_is_left(self) -> None:
        """No reservation and nobody waiting."""
        await self.until(lambda: not self.router.pool.dispatcher.dispatched)
        page = await self.workers()
        assert page["in_flight"] == 0
        assert page["waiting"] == 0
        assert [w["in_flight"] for w in page["workers"]] == [0] * len(page["workers"])

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits for a condition."""
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                await asyncio.sleep(0.005)

    async def state(self, name: str, state: str) -> None:
        """Waits until the worker is in the state."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                page = await self.workers()
                if any(w["worker"] == name and w["state"] == state for w in page["workers"]):
                    return
                await asyncio.sleep(0.005)

    async def metric(self, name: str, **labels: str) -> float:
        """A metric's value; 0 if it has not been counted."""
        value = self.router.metrics.registry.get_sample_value(f"kvrouting_router_{name}", labels)
        return value or 0.0

    async def sidecar(self, engine: FakeHttpEngine, **changes: Any) -> FakeSidecar:
        """A live worker with an empty tree for the engine."""
        sidecar = FakeSidecar(self.grpc_target, self.greeting(engine, **changes), token="join", channel=None)
        self.sidecars.append(sidecar)
        await sidecar.connect()
        await sidecar.snapshot()
        await sidecar.heartbeat()
        await self.state(f"{sidecar.hello.pod_uid}/{sidecar.hello.dp_rank}", "live")
        return sidecar

    def greeting(self, engine: FakeHttpEngine, **changes: Any) -> Any:
        """A Hello that fits this router."""
        return hello(**{"http_endpoint": engine.url, "hash_key_id": HASHER.key_id} | changes)


def config(**changes: Any) -> RouterConfig:
    """A configuration for tests."""
    values: dict[str, Any] = {
        "pool": "p",
        "model": MODEL,
        "block_size_tokens": BLOCK,
        "hash_key": KEY,
        "http_port": 0,
        "grpc_port": 0,
        "join_token": "join",
        "policy": "least_load",
        "seed": 1,
        "log_decisions": False,
        "options": options(),
    }
    return RouterConfig(**values | changes)


def options(**changes: Any) -> RouterOptions:
    """Limits as short as tests need them; `times=dict(...)` and so on change single ones."""
    times = {"connect_s": 1.0, "shutdown_s": 2.0} | changes.get("times", {})
    sync = {"heartbeat_interval_s": 0.1, "silence_s": 30.0, "gone_s": 60.0} | changes.get("sync", {})
    breaker = {"failures": 3, "probe_s": 0.05} | changes.get("breaker", {})
    routing = changes.get("routing", {})
    sizes = changes.get("sizes")
    base = {} if sizes is None else {"sizes": sizes}
    return RouterOptions(
        times=TimeLimits(**times),
        sync=SyncOptions(**sync),
        breaker=BreakerOptions(**breaker),
        routing=RoutingOptions(**routing),
        **base,
    )


@contextlib.asynccontextmanager
async def running_router(
    settings: RouterConfig | None = None,
    *,
    tokenizer: Any = None,
    policy: PolicyFactory | None = None,
    tracer: Tracer | None = None,
    with_tokenizer: bool = True,
) -> AsyncIterator[RouterUnderTest]:
    """A started router; stopped at the end."""
    router = Router(
        settings or config(),
        tokenizer=tokenizer or (ByteTokenizer() if with_tokenizer else None),
        tracer=tracer or NoTracer(),
        policy=policy,
    )
    await router.start()
    session = aiohttp.ClientSession()
    under_test = RouterUnderTest(router, session)
    try:
        yield under_test
    finally:
        for sidecar in under_test.sidecars:
            await sidecar.close()
        await session.close()
        await router.stop()


def static(engine: FakeHttpEngine, capacity_tokens: int = 16_000) -> StaticWorker:
    """An engine without a sidecar."""
    return StaticWorker(url=engine.url, worker_class="L40", capacity_tokens=capacity_tokens)
