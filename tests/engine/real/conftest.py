"""The real servers of the tests: started once, together, when the first test asks for one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.engine.real.servers import RealServer
from tests.engine.real.tiny_model import write_model


@dataclass(frozen=True)
class Servers:
    """rlt: page size -> a server with the plug-in. lru: stock, page size 1."""

    rlt: dict[int, RealServer]
    lru: RealServer


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def servers(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    logs = tmp_path_factory.mktemp("logs")
    started = Servers(
        rlt={
            page_size: RealServer(
                model,
                log=logs / f"rlt-{page_size}",
                page_size=page_size,
                flags=("--random-seed", "11"),
            )
            for page_size in (1, 16)
        },
        lru=RealServer(model, log=logs / "lru", rlt=False),
    )
    every = [*started.rlt.values(), started.lru]
    try:
        for server in every:
            server.wait_until_ready()
        yield started
    finally:
        for server in every:
            server.stop()
