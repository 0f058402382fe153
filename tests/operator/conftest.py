"""One cluster for all tests of a run, and a namespace for each test."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvrouting_operator.crd import custom_resource_definition
from tests.operator.kubernetes_under_test import KIT, Kubernetes, NoClusterError, eventually, kubernetes, pool_path


@pytest.fixture(scope="session")
def kube() -> Iterator[Kubernetes]:
    """A cluster with the CRD. Without one the test is skipped, or fails where the tool-kit should have brought one."""
    # Sockets and certificates of the cluster want a short path.
    with tempfile.TemporaryDirectory(prefix="kvr-") as folder:
        context = kubernetes(Path(folder) / "run")
        try:
            cluster = context.__enter__()
        except NoClusterError as error:
            if os.environ.get("CI") and KIT.exists():
                raise
            pytest.skip(str(error))
        try:
            cluster.cluster.apply(custom_resource_definition(), force=True)
            eventually(lambda: cluster.request("GET", pool_path("default"))[0] == 200, what="the CRD")
            yield cluster
        finally:
            context.__exit__(None, None, None)


@pytest.fixture
def namespace(kube: Kubernetes, request: pytest.FixtureRequest) -> Iterator[str]:
    """A namespace of the test's own; its deletion is asked for and not waited for."""
    name = "t-" + os.urandom(4).hex()
    kube.request("POST", "/api/v1/namespaces", {"metadata": {"name": name, "annotations": {"test": request.node.name}}})
    yield name
    kube.delete(f"/api/v1/namespaces/{name}")


@pytest.fixture(scope="session")
def gpu_nodes(kube: Kubernetes) -> tuple[str, ...]:
    """Nodes with L40 and H200 labels, on which pods run without processes."""
    if kube.kit is None:
        pytest.skip("this cluster takes no nodes without machines")
    for name, gpu in (("l40-a", "L40"), ("l40-b", "L40"), ("h200-a", "H200")):
        kube.kit("fake-node", name, gpu, "8")
    return ("l40-a", "l40-b", "h200-a")
