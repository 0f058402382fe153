"""The real servers of the tests: started once, together, when the first test asks for one."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from tests.engine.real.servers import RealServer
from tests.engine.real.tiny_model import write_model
from tests.engine.real.whole_path import RealPool
from tests.jaeger import running_jaeger

SMALL_BUFFERS = {"buffer_steps": 20, "hwm": 100, "max_queue_size": 100}
"""Of the engine's publisher: a load of a few seconds overruns them."""


ENGINE_SERVICE = "sglang-under-test"
"""Under which name the servers send their spans."""


@dataclass(frozen=True)
class JaegerAddress:
    """otlp: where spans are sent. query: base URL of its API."""

    otlp: str
    query: str


@dataclass(frozen=True)
class Servers:
    """rlt: page size -> a server with the plug-in. lru: stock, page size 1."""

    rlt: dict[int, RealServer]
    lru: RealServer

    @property
    def all(self) -> list[RealServer]:
        return [*self.rlt.values(), self.lru]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def jaeger(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JaegerAddress | None]:
    """None where there is none: the servers are wanted without it."""
    with contextlib.ExitStack() as running:
        try:
            otlp, query = running.enter_context(running_jaeger(tmp_path_factory.mktemp("jaeger")))
        except pytest.skip.Exception:
            yield None
            return
        yield JaegerAddress(otlp=otlp, query=query)


@pytest.fixture(scope="session")
def starting_servers(
    model: Path, jaeger: JaegerAddress | None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Servers]:
    """On their way to be ready."""
    logs = tmp_path_factory.mktemp("logs")
    tracing = () if jaeger is None else (
        "--enable-trace", "--otlp-traces-endpoint", jaeger.otlp, "--otlp-service-name", ENGINE_SERVICE
    )  # fmt: skip
    started = Servers(
        rlt={
            page_size: RealServer(
                model,
                log=logs / f"rlt-{page_size}",
                page_size=page_size,
                flags=("--random-seed", "11", *tracing),
                events=SMALL_BUFFERS,
            )
            for page_size in (1, 16)
        },
        lru=RealServer(model, log=logs / "lru", rlt=False),
    )
    try:
        yield started
    finally:
        for server in started.all:
            server.stop()


@pytest.fixture(scope="session", autouse=True)
def early_start(request: pytest.FixtureRequest) -> None:
    """Servers take a minute to start: they do it beside the tests that need none of them."""
    if any("servers" in getattr(item, "fixturenames", ()) for item in request.session.items):
        request.getfixturevalue("starting_servers")


@pytest.fixture(scope="session")
def servers(starting_servers: Servers) -> Servers:
    for server in starting_servers.all:
        server.wait_until_ready()
    return starting_servers


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def pool(
    servers: Servers, jaeger: JaegerAddress | None, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[RealPool]:
    """Router and sidecars for the two servers with the plug-in: workers `page1/0` and `page16/0`."""
    workers = {f"page{page_size}": server for page_size, server in servers.rlt.items()}
    async with RealPool(
        workers,
        folder=tmp_path_factory.mktemp("pool"),
        router_options=["--tracing"] if jaeger else [],
        environment={"OTEL_EXPORTER_OTLP_ENDPOINT": jaeger.otlp} if jaeger else None,
    ) as running:
        yield running
