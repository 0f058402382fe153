"""What the chart renders, judged by the API server."""

from __future__ import annotations

from pathlib import Path

import pytest

from e2e.cluster import Cluster
from e2e.conftest import CHART, Release

SCENARIOS = sorted(Path(CHART).glob("ci/*-values.yaml"))


@pytest.mark.parametrize("values", SCENARIOS, ids=lambda path: path.name.removesuffix("-values.yaml"))
def test_the_api_server_takes_every_object_of_a_scenario(
    cluster: Cluster, release: Release, namespace: str, values: Path
) -> None:
    rendered = cluster.helm("template", "scenario", CHART, f"--namespace={namespace}", "--values", str(values))

    said = cluster.kubectl(
        *("apply", "--server-side", "--dry-run=server", "--validate=strict", "--field-manager=test", "--filename=-"),
        stdin=rendered,
    )

    applied = [line for line in said.splitlines() if line.endswith("serverside-applied (server dry run)")]
    assert len(applied) == rendered.count("\nkind: ") > 0
