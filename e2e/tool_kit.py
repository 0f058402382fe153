"""Which cluster the tests get: the one that is named, else one of the shared tool-kit, else none, with the reason."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from e2e.cluster import Cluster, Images

ROOT = Path(__file__).resolve().parent.parent
KIT = ROOT.parent / "shared" / "k8s" / "cluster"
IMAGES = ("operator", "router", "sidecar", "engine-simulated", "sglang-plugin")
# Another tag than any release's: what is tested is this working tree and nothing that was pulled.
_TAG = "e2e"
_JAEGER = f"kvrouting-e2e/jaeger:{_TAG}"
_BUILD_S = 900.0
_START_S = 600.0


class NoClusterError(Exception):
    """There is no cluster to test on; the message is the reason."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """kubeconfig: of a cluster that is there. kit: the tool-kit's command. reason: why there is neither."""

    kubeconfig: Path | None = None
    kit: Path | None = None
    reason: str = ""

    def __str__(self) -> str:
        if self.kubeconfig is not None:
            return f"the cluster of {self.kubeconfig} (KVROUTING_E2E_KUBECONFIG)"
        if self.kit is not None:
            return f"a cluster with a real node, by {self.kit}"
        return f"none: {self.reason}"

    @property
    def must_run(self) -> bool:
        """Whether a missing cluster is a failure: in CI, where the kit is there."""
        return os.environ.get("CI") == "true" and KIT.exists()


def choose() -> Choice:
    """Looks at the environment; starts nothing."""
    named = os.environ.get("KVROUTING_E2E_KUBECONFIG")
    if named:
        return Choice(kubeconfig=Path(named))
    if not KIT.exists():
        return Choice(reason="set KVROUTING_E2E_KUBECONFIG to the kubeconfig of a cluster to test on")
    if os.geteuid() != 0:
        return Choice(reason="a real node needs root; or set KVROUTING_E2E_KUBECONFIG")
    return Choice(kit=KIT)


@contextmanager
def started(choice: Choice) -> Iterator[Cluster]:
    """The chosen cluster, with the images of this working tree. Raises: NoClusterError."""
    if choice.kubeconfig is not None:
        registry = os.environ.get("KVROUTING_E2E_REGISTRY", "")
        tag = os.environ.get("KVROUTING_E2E_TAG", _TAG)
        yield Cluster(
            kubeconfig=choice.kubeconfig,
            path=os.environ["PATH"],
            images=Images(registry=registry, tag=tag, jaeger=os.environ.get("KVROUTING_E2E_JAEGER_IMAGE", "")),
            origin=str(choice),
        )
    elif choice.kit is not None:
        with _kit_cluster(choice.kit, str(choice)) as cluster:
            yield cluster
    else:
        raise NoClusterError(choice.reason)


@contextmanager
def _kit_cluster(kit: Path, origin: str) -> Iterator[Cluster]:
    """Its end is the end of every process of the cluster, whatever happened."""
    folder = Path(tempfile.mkdtemp(prefix="kvrouting-e2e-"))
    # The folder of the cluster itself goes with it.
    env = {**os.environ, "KVCLUSTER_RUN": str(folder / "run")}
    try:
        kubeconfig = Path(_kit(kit, ["up", "--node"], env, _START_S).splitlines()[-1])
        for image in IMAGES:
            command = ["build", str(ROOT / "images/Dockerfile"), str(ROOT), f"kvrouting/{image}:{_TAG}"]
            _kit(kit, [*command, "--target", image], env, _BUILD_S)
        tools = Path(_kit(kit, ["unpack"], env, _START_S).strip())
        _load_jaeger(kit, tools, folder / "jaeger", env)
        yield Cluster(
            kubeconfig=kubeconfig,
            path=f"{tools}:{os.environ['PATH']}",
            images=Images(tag=_TAG, jaeger=_JAEGER),
            origin=origin,
        )
    finally:
        _kit(kit, ["down"], env, _START_S)
        shutil.rmtree(folder, ignore_errors=True)


def _load_jaeger(kit: Path, tools: Path, root: Path, env: dict[str, str]) -> None:
    """An image with the one file that Jaeger is."""
    root.mkdir()
    shutil.copy(tools / "jaeger", root)
    _kit(kit, ["image", str(root), _JAEGER, "--entrypoint", "/jaeger"], env, _START_S)
    shutil.rmtree(root)


def _kit(kit: Path, arguments: Sequence[str], env: dict[str, str], limit_s: float) -> str:
    # Into files: what the kit starts inherits them, and a pipe would be waited for until the cluster's end.
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        code = subprocess.run([str(kit), *arguments], env=env, stdout=out, stderr=err, timeout=limit_s, check=False)
        out.seek(0)
        err.seek(0)
        text, said = out.read(), err.read()
    if code.returncode:
        raise NoClusterError(f"cluster {' '.join(arguments)} ended with {code.returncode}: {said[-2000:]}")
    return text
