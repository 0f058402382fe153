"""The cluster, the release and a namespace for each test."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from e2e.cluster import Cluster, eventually
from e2e.pool import Pool, simulated_pool
from e2e.tool_kit import ROOT, Choice, NoClusterError, choose, started

CHART = str(ROOT / "helm/kvrouting")
# Every test runs under the strictest of Kubernetes' own rules.
RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted"}
_LONGEST_S = 1500
# What comes last: these change the release, and then remove it.
_LAST = ("test_upgrade.py", "test_uninstall.py")


@dataclass(frozen=True, kw_only=True, slots=True)
class Release:
    """The installed chart, with one pool from its values."""

    cluster: Cluster
    name: str
    namespace: str
    values: Path

    @property
    def pool(self) -> Pool:
        """The pool from the values."""
        return Pool(cluster=self.cluster, name="first", namespace=self.namespace)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All of these tests need a cluster, and time: the first one's includes the cluster's start and the images."""
    for item in items:
        item.add_marker(pytest.mark.cluster)
        item.add_marker(pytest.mark.timeout(_LONGEST_S))
    items.sort(key=lambda item: _LAST.index(item.path.name) if item.path.name in _LAST else -1)


def pytest_report_header() -> Sequence[str]:
    """Which cluster it is."""
    return [f"cluster: {choose()}"]


@pytest.fixture(scope="session")
def choice() -> Choice:
    """Which cluster the tests get."""
    return choose()


@pytest.fixture(scope="session")
def cluster(choice: Choice) -> Iterator[Cluster]:
    """The cluster, with the images of this working tree; down at the end."""
    if choice.reason:
        if choice.must_run:
            pytest.fail(f"no cluster: {choice.reason}")
        pytest.skip(choice.reason)
    try:
        with started(choice) as cluster:
            yield cluster
    except NoClusterError as error:
        pytest.fail(str(error))


@pytest.fixture(scope="session")
def release(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Release]:
    """helm install, with a pool from values."""
    values = tmp_path_factory.mktemp("release") / "values.yaml"
    first = simulated_pool("first", "", replicas=1)["spec"]
    # An autoscaler owns it in one of the tests.
    del first["replicas"]
    images = {"tag": cluster.images.tag, "registry": cluster.images.registry}
    values.write_text(yaml.safe_dump({"images": images, "pools": {"first": {"spec": first}}}))
    name = f"kvr-{secrets.token_hex(3)}"
    with cluster.namespace(name, labels=RESTRICTED):
        cluster.helm("install", name, CHART, "--namespace", name, "--values", str(values), "--wait", "--timeout=180s")
        yield Release(cluster=cluster, name=name, namespace=name, values=values)


@pytest.fixture(scope="session")
def settled_pair(cluster: Cluster, release: Release) -> Iterator[Pool]:
    """A pool for many tests: each start of processes takes its time on two cores."""
    with cluster.namespace(f"e2e-{secrets.token_hex(4)}", labels=RESTRICTED) as namespace:
        cluster.apply(simulated_pool("pair", namespace, replicas=2))
        yield Pool(cluster=cluster, name="pair", namespace=namespace)


@pytest.fixture
def pair(settled_pair: Pool) -> Pool:
    """A pool with two workers and one router, good when the test begins, whatever an earlier test has left."""
    settled_pair.patch({"replicas": 2, "router": {"replicas": 1}})
    settled_pair.wait_until_good(workers=2)
    eventually("there is one router", lambda: len(settled_pair.pod_names("router")) == 1, patience_s=60)
    return settled_pair


@pytest.fixture
def namespace(cluster: Cluster, release: Release) -> Iterator[str]:
    """A namespace of its own, while the operator runs."""
    with cluster.namespace(f"e2e-{secrets.token_hex(4)}", labels=RESTRICTED) as name:
        yield name
