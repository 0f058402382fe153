"""A Kubernetes for tests: the one that is named, or the tool-kit beside the repository, or none with the reason."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml

from kvrouting_operator.cluster import ClusterError
from kvrouting_operator.crd import KIND
from kvrouting_operator.kubernetes_cluster import KubernetesCluster, load_configuration
from kvrouting_operator.pool import Images, Object
from kvrouting_operator.process import run
from kvrouting_operator.resources.names import COMPONENT_LABEL, POOL_LABEL, WORKER
from kvrouting_operator.router_report import PoolReport, RouterAddress, WorkerReport
from kvrouting_operator.settings import OperatorSettings
from kvrouting_operator.work_queue import Pace
from tests.operator.pools import IMAGES, report_of

ROOT = Path(__file__).resolve().parents[2]
KIT = ROOT.parent / "shared" / "k8s" / "cluster"
NAMED = "KVROUTING_E2E_KUBECONFIG"
_LIMIT_S = 60.0
T = TypeVar("T")


class NoClusterError(Exception):
    """There is no cluster to test on; the message says why."""


@dataclass(kw_only=True)
class Kubernetes:
    """A cluster of which we are the administrators. kit: None if it is somebody's own, without nodes that we may
    add.
    """

    kubeconfig: Path
    kit: Kit | None
    cluster: KubernetesCluster = field(init=False)

    def __post_init__(self) -> None:
        configuration = load_configuration(str(self.kubeconfig))
        self.cluster = KubernetesCluster(configuration, limit_s=15, parallel=4)

    def request(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, *, query: str = ""
    ) -> tuple[int, Any]:
        """Status and answer of a plain request, as kubectl would send it."""
        return plain_request(str(self.kubeconfig), method, path, body, query=query)

    def delete(self, path: str) -> None:
        """Asks for an object's deletion."""
        self.request("DELETE", path)


@dataclass(frozen=True, kw_only=True)
class Kit:
    """One running cluster of the tool-kit."""

    folder: Path

    def __call__(self, *words: str) -> str:
        """Runs the tool. Raises: CalledProcessError."""
        env = {**os.environ, "KVCLUSTER_RUN": str(self.folder)}
        done = subprocess.run([str(KIT), *words], env=env, capture_output=True, text=True, timeout=180, check=False)
        if done.returncode:
            raise NoClusterError(f"cluster {' '.join(words)}: {done.stderr[-2000:]}")
        return done.stdout

    def audit(self, user: str) -> list[dict[str, Any]]:
        """The requests of a user, complete ones only."""
        lines = (self.folder / "audit.log").read_text().splitlines()
        events = [json.loads(line) for line in lines if line.endswith("}")]
        return [event for event in events if event["user"].get("username") == user]  # one that is refused has no name


@contextmanager
def kubernetes(folder: Path) -> Iterator[Kubernetes]:
    """Raises: NoClusterError."""
    if NAMED in os.environ:
        yield Kubernetes(kubeconfig=Path(os.environ[NAMED]), kit=None)
        return
    if not KIT.exists():
        raise NoClusterError(f"{NAMED} names no cluster, and there is no tool-kit at ../shared/k8s")
    kit = Kit(folder=folder)
    try:
        kit("up")
        yield Kubernetes(kubeconfig=folder / "kubeconfig", kit=kit)
    finally:
        kit("down")


def plain_request(
    kubeconfig: str, method: str, path: str, body: Mapping[str, Any] | None = None, *, query: str = ""
) -> tuple[int, Any]:
    """Without any of the operator's code in between."""
    import ssl

    loaded = yaml.safe_load(Path(kubeconfig).read_text())
    server, user = loaded["clusters"][0]["cluster"], loaded["users"][0]["user"]
    headers = {"Authorization": f"Bearer {user['token']}", "Content-Type": "application/json"}
    if method == "PATCH":
        headers["Content-Type"] = "application/merge-patch+json"
    data = json.dumps(body).encode() if body is not None else None
    url = f"{server['server']}{path}" + (f"?{query}" if query else "")
    request = urllib.request.Request(url, data=data, method=method, headers=headers)
    context = ssl.create_default_context(cafile=server["certificate-authority"])
    try:
        with urllib.request.urlopen(request, context=context, timeout=30) as answer:
            return answer.status, _told(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, _told(error.read())


def _told(body: bytes) -> Any:
    """What is no JSON is a message."""
    try:
        return json.loads(body or b"{}")
    except json.JSONDecodeError:
        return {"message": body.decode(errors="replace")}


def eventually(find: Callable[[], T | None], *, what: str, limit_s: float = _LIMIT_S) -> T:
    """The first truthy result. Raises: AssertionError naming what was waited for, after the limit."""
    end_s = time.monotonic() + limit_s
    while True:
        try:
            found = find()
        except ClusterError:
            found = None
        if found:
            return found
        assert time.monotonic() < end_s, f"waited {limit_s} s for {what}"
        time.sleep(0.1)


def conditions(pool: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Type → status and reason."""
    return {c["type"]: (c["status"], c["reason"]) for c in pool.get("status", {}).get("conditions", [])}


class WorkersInOrder:
    """Routers for pods without processes: they know every worker pod that is ready, and say the best of it.

    reports: pod name → what is said instead.
    """

    def __init__(self, cluster: KubernetesCluster) -> None:
        self._cluster = cluster
        self.reports: dict[str, WorkerReport] = {}

    def __call__(self, routers: Iterable[RouterAddress], *, block_size_tokens: int) -> PoolReport:
        """See ReportFetcher."""
        asked = list(routers)
        if not asked:
            return PoolReport()
        pool = asked[0].pod.rsplit("-router-", 1)[0]
        pods = self._cluster.find("Pod", None, selector=f"{COMPONENT_LABEL}={WORKER},{POOL_LABEL}={pool}")
        workers = {p["metadata"]["uid"]: self.reports.get(p["metadata"]["name"], report_of()) for p in pods}
        return PoolReport(answered=len(asked), workers=workers)


@dataclass(kw_only=True)
class RunningOperator:
    """An operator in a thread of this process. routers: what its routers say."""

    routers: WorkersInOrder
    probe_port: int = 0

    def probe(self, page: str) -> int:
        """Status of one of the kubelet's pages."""
        return self.said(page)[0]

    def said(self, page: str) -> tuple[int, str]:
        """Status of one of the kubelet's pages, and its text."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.probe_port}/{page}", timeout=5) as answer:
                return int(answer.status), answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()


@contextmanager
def running_operator(
    kubernetes: Kubernetes,
    *,
    images: Images = IMAGES,
    namespaces: tuple[str, ...] = (),
    kubeconfig: Path | None = None,
    **settings: Any,
) -> Iterator[RunningOperator]:
    """Ready when it is yielded. kubeconfig: another one than the administrators'. settings: what differs."""
    import asyncio

    values: dict[str, Any] = {"resync_s": 2, "probe_host": "127.0.0.1", "probe_port": 0} | settings
    told = OperatorSettings(
        images=images, namespaces=namespaces, kubeconfig=str(kubeconfig or kubernetes.kubeconfig), **values
    )
    operator = RunningOperator(routers=WorkersInOrder(kubernetes.cluster))
    stop, failures = threading.Event(), list[BaseException]()
    pace = Pace(gather_s=0.05, unsettled_s=0.5, first_retry_s=0.5, longest_s=2)

    def work() -> None:
        def listening(port: int) -> None:
            operator.probe_port = port

        try:
            asyncio.run(run(told, fetch=operator.routers, pace=pace, stop=stop, on_listening=listening))
        except BaseException as error:  # noqa: BLE001 - told to the test's thread
            failures.append(error)

    thread = threading.Thread(target=work, name="operator", daemon=True)
    thread.start()
    try:
        eventually(lambda: failures or (operator.probe_port and operator.probe("readyz") == 200), what="the operator")
        yield operator
    finally:
        stop.set()
        thread.join(timeout=30)
        assert not thread.is_alive(), "the operator does not end"
        assert failures == []


def pool_path(namespace: str, name: str = "") -> str:
    """Of a pool, or of a namespace's pools."""
    return f"/apis/kvrouting.dev/v1alpha1/namespaces/{namespace}/kvroutingpools" + (f"/{name}" if name else "")


def manifest(name: str, spec: Mapping[str, Any]) -> Object:
    """As a user writes it."""
    return {"apiVersion": "kvrouting.dev/v1alpha1", "kind": KIND, "metadata": {"name": name}, "spec": dict(spec)}
