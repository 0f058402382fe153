"""The real servers of the tests, each started once, beside the tests that do not need it yet."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.engine.real.interpreters import FOUND_BY_ANOTHER_VERSION, LOADED, RANK, run_python
from tests.engine.real.rank_servers import data_parallel, tensor_parallel
from tests.engine.real.servers import RealServer
from tests.engine.real.start_line import StartingServer, StartLine
from tests.engine.real.tiny_model import write_model
from tests.engine.real.whole_path import RealPool
from tests.jaeger import running_jaeger

SMALL_BUFFERS = {"buffer_steps": 20, "hwm": 100, "max_queue_size": 100}
"""Of the engine's publisher: a load of a few seconds overruns them."""

ENGINE_SERVICE = "sglang-under-test"
"""Under which name the servers send their spans."""

TAIL_POLICIES = ("rlt", "rlt-adaptive")

STARTED_EARLY = (
    "starting_servers", "starting_refused", "starting_interpreters", "starting_tp", "starting_adaptive", "starting_dp"
)  # fmt: skip
"""Fixtures, in the order in which they start what takes long."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """First the tests that need nothing of what is started early, then each as soon as it may have it."""
    items.sort(key=_place)


def _place(item: pytest.Item) -> int:
    needed = getattr(item, "fixturenames", ())
    if "quiet" in needed:
        return len(STARTED_EARLY)
    return max((place for place, name in enumerate(STARTED_EARLY) if name in needed), default=-1)


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


@dataclass(frozen=True)
class Interpreters:
    """What fresh interpreters tell. ranks: one for each of two hash seeds."""

    loaded: Future[Any]
    found_by_another_version: Future[Any]
    ranks: tuple[Future[Any], Future[Any]]


@pytest.fixture(scope="session", autouse=True)
def early_start(request: pytest.FixtureRequest) -> None:
    """Begins what some test needs."""
    wanted = [item for item in request.session.items if not any(each.args[0] for each in item.iter_markers("skipif"))]
    for name in STARTED_EARLY:
        if any(name in getattr(item, "fixturenames", ()) for item in wanted):
            request.getfixturevalue(name)


@pytest.fixture(scope="session")
def start_line() -> Iterator[StartLine]:
    line = StartLine()
    yield line
    line.close()


@pytest.fixture
def quiet(start_line: StartLine) -> None:
    """Nothing starts beside the test."""
    start_line.until_all_are_done()


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
    model: Path, jaeger: JaegerAddress | None, start_line: StartLine, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Mapping[str, StartingServer]]:
    """`rlt-1` and `rlt-16`, by page size, and `lru`."""
    logs = tmp_path_factory.mktemp("logs")
    tracing = () if jaeger is None else (
        "--enable-trace", "--otlp-traces-endpoint", jaeger.otlp, "--otlp-service-name", ENGINE_SERVICE
    )  # fmt: skip
    servers = {
        f"rlt-{page_size}": RealServer(
            model,
            log=logs / f"rlt-{page_size}",
            page_size=page_size,
            flags=("--random-seed", "11", *tracing),
            events=SMALL_BUFFERS,
        )
        for page_size in (1, 16)
    }
    servers["lru"] = RealServer(model, log=logs / "lru", rlt=False)
    starting = {name: StartingServer(start_line, server) for name, server in servers.items()}
    yield starting
    for each in starting.values():
        each.stop()


@pytest.fixture(scope="session")
def starting_refused(
    model: Path, start_line: StartLine, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Future[str]]:
    """The log of a server with a policy that nobody knows, once it has ended."""
    server = RealServer(
        model, log=tmp_path_factory.mktemp("refused") / "log", environment={"KVROUTING_ENGINE_POLICY": "fifo"}
    )
    ending = start_line.begin(lambda: server.start().wait_for_end())
    yield ending
    ending.cancel()
    server.stop()


@pytest.fixture(scope="session")
def starting_interpreters(start_line: StartLine) -> Interpreters:
    return Interpreters(
        loaded=start_line.begin(partial(run_python, LOADED)),
        found_by_another_version=start_line.begin(partial(run_python, FOUND_BY_ANOTHER_VERSION)),
        ranks=(
            start_line.begin(partial(run_python, RANK, *TAIL_POLICIES, PYTHONHASHSEED="1")),
            start_line.begin(partial(run_python, RANK, *TAIL_POLICIES, PYTHONHASHSEED="31337")),
        ),
    )


@pytest.fixture(scope="session")
def starting_tp(
    model: Path, start_line: StartLine, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[StartingServer]:
    """Two tensor-parallel ranks with rlt."""
    server = tensor_parallel(
        model, folder=tmp_path_factory.mktemp("tp"), environment={"KVROUTING_ENGINE_POLICY": "rlt"}
    )
    starting = StartingServer(start_line, server)
    yield starting
    starting.stop()


@pytest.fixture(scope="session")
def starting_adaptive(
    model: Path, start_line: StartLine, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[StartingServer]:
    """Two tensor-parallel ranks that are told no policy."""
    starting = StartingServer(start_line, tensor_parallel(model, folder=tmp_path_factory.mktemp("adaptive")))
    yield starting
    starting.stop()


@pytest.fixture(scope="session")
def starting_dp(
    model: Path, start_line: StartLine, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[StartingServer]:
    """Two data-parallel ranks."""
    starting = StartingServer(start_line, data_parallel(model, log=tmp_path_factory.mktemp("dp") / "log"))
    yield starting
    starting.stop()


@pytest.fixture(scope="session")
def servers(starting_servers: Mapping[str, StartingServer]) -> Servers:
    ready = {name: starting.ready() for name, starting in starting_servers.items()}
    return Servers(rlt={1: ready["rlt-1"], 16: ready["rlt-16"]}, lru=ready["lru"])


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
