"""What becomes of the operator when the API server refuses it, or falls silent, while it runs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from kvrouting_operator.crd import CRD_NAME, custom_resource_definition
from kvrouting_operator.pool import Object
from kvrouting_operator.rbac import Rules, pool_rules
from tests.operator.kubernetes_under_test import (
    Kubernetes,
    RunningOperator,
    eventually,
    manifest,
    pool_path,
    running_operator,
)
from tests.operator.pools import raw_spec
from tests.operator.test_cluster_rights import RIGHTS, account_kubeconfig, grant

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("gpu_nodes")]


def without_watch(rules: Rules) -> Rules:
    """The same rights, but to watch nothing."""
    return [{**rule, "verbs": [verb for verb in rule["verbs"] if verb != "watch"]} for rule in rules]


def set_rights(kube: Kubernetes, name: str, rules: Rules) -> None:
    """Of a ClusterRole that is there."""
    status, answer = kube.request("PATCH", f"{RIGHTS}/clusterroles/{name}", {"rules": rules})
    assert status == 200, answer


def set_replicas(kube: Kubernetes, namespace: str, replicas: int) -> None:
    """As a user edits it."""
    status, answer = kube.request("PATCH", pool_path(namespace, "llama"), {"spec": {"replicas": replicas}})
    assert status == 200, answer


def workers_wanted(kube: Kubernetes, namespace: str, pool: str = "llama") -> int:
    """By the Deployment."""
    found: Object = kube.cluster.get("Deployment", namespace, f"{pool}-worker") or {"spec": {"replicas": -1}}
    return int(found["spec"]["replicas"])


def not_ready_for(operator: RunningOperator, reason: str) -> bool:
    """Whether the operator says that it is not ready, with this reason."""
    status, said = operator.said("readyz")
    return status == 503 and reason in said


def test_a_watch_that_is_refused_ends_nothing_and_is_told(kube: Kubernetes, namespace: str, tmp_path: Path) -> None:
    kubeconfig = account_kubeconfig(kube, namespace, tmp_path)
    role = f"{namespace}-pools"
    grant(kube, role, pool_rules(), namespace, namespace)
    settings: dict[str, Any] = {"apply_crd": False, "resync_s": 1, "watch_s": 1, "silence_limit_s": 2}
    with running_operator(kube, namespaces=(namespace,), kubeconfig=kubeconfig, **settings) as operator:
        kube.request("POST", pool_path(namespace), manifest("llama", raw_spec(replicas=1)))
        eventually(lambda: workers_wanted(kube, namespace) == 1, what="the pool")
        set_rights(kube, role, without_watch(pool_rules()))
        eventually(lambda: not_ready_for(operator, 'cannot watch resource "kvroutingpools"'), what="the refusal")

        # It still looks at pools regularly; and starting it anew would not bring the right back.
        set_replicas(kube, namespace, 2)
        eventually(lambda: workers_wanted(kube, namespace) == 2, what="a regular look")
        set_replicas(kube, namespace, 3)
        eventually(lambda: workers_wanted(kube, namespace) == 3, what="another one")
        silent = [operator.probe("healthz") for _ in range(5)]

        set_rights(kube, role, pool_rules())
        eventually(lambda: operator.probe("readyz") == 200, what="the watch")
    assert silent == [200] * 5


def test_a_crd_that_is_taken_away_and_comes_back_ends_nothing(kube: Kubernetes, namespace: str) -> None:
    crds = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
    with running_operator(kube, namespaces=(namespace,), resync_s=1, watch_s=1) as operator:
        kube.request("POST", pool_path(namespace), manifest("llama", raw_spec(replicas=1)))
        eventually(lambda: workers_wanted(kube, namespace) == 1, what="the pool")
        kube.delete(f"{crds}/{CRD_NAME}")
        eventually(lambda: not_ready_for(operator, "pools cannot be listed"), what="word of it")
        eventually(lambda: kube.request("GET", f"{crds}/{CRD_NAME}")[0] == 404, what="the CRD's end")
        assert operator.probe("healthz") == 200

        kube.cluster.apply(custom_resource_definition(), force=True)
        eventually(lambda: operator.probe("readyz") == 200, what="the operator at work again")
        # By another name: what the first one owned goes only when the garbage collector has heard of the new CRD.
        kube.request("POST", pool_path(namespace), manifest("again", raw_spec(replicas=2)))
        eventually(lambda: workers_wanted(kube, namespace, "again") == 2, what="the new pool")


def test_credentials_that_are_refused_end_nothing(
    kube: Kubernetes, namespace: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A deleted ServiceAccount makes its token void: the API server answers 401, and nothing in the process helps."""
    kubeconfig = account_kubeconfig(kube, namespace, tmp_path)
    grant(kube, f"{namespace}-pools", pool_rules(), namespace, namespace)
    settings: dict[str, Any] = {"apply_crd": False, "resync_s": 1, "watch_s": 1}
    with running_operator(kube, namespaces=(namespace,), kubeconfig=kubeconfig, **settings) as operator:
        kube.delete(f"/api/v1/namespaces/{namespace}/serviceaccounts/operator")
        eventually(lambda: not_ready_for(operator, "401"), what="word of it")
        eventually(lambda: caplog.text.count("credentials were refused") >= 2, what="more than one try")
        assert not_ready_for(operator, "401")
        assert operator.probe("healthz") == 200


class Mute:
    """A proxy before the API server. `mute`: connections that are open from then on hear nothing more, and stay open;
    new ones pass.
    """

    def __init__(self, server: str) -> None:
        address = urlsplit(server)
        self._target = (address.hostname, address.port)
        self._muted: set[asyncio.StreamWriter] = set()
        self._open: set[asyncio.StreamWriter] = set()
        self._is_released = False
        self.port = 0

    async def serve(self, started: threading.Event, ended: threading.Event) -> None:
        """Until `ended`."""
        server = await asyncio.start_server(self._connection, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        started.set()
        while not ended.is_set():
            await asyncio.sleep(0.05)
            if self._is_released:
                for writer in self._muted:
                    writer.transport.abort()
        server.close()
        for writer in tuple(self._open):
            writer.transport.abort()
        # The loop closes the sockets of aborted transports in its next turns.
        await asyncio.sleep(0.1)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        above_reader, above = await asyncio.open_connection(*self._target)
        self._open |= {writer, above}
        await asyncio.gather(self._pass(reader, above, mutable=False), self._pass(above_reader, writer, mutable=True))

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, mutable: bool) -> None:
        try:
            while data := await reader.read(65536):
                if not (mutable and writer in self._muted):
                    writer.write(data)
                    await writer.drain()
        except OSError:
            pass
        finally:
            if not (mutable and writer in self._muted):
                writer.close()

    def mute(self) -> None:
        """From another thread."""
        self._muted = set(self._open)

    def release(self) -> None:
        """Breaks the muted connections off: one that hears nothing cannot be closed in the way of TLS."""
        self._is_released = True


@contextmanager
def mute_proxy(kube: Kubernetes, folder: Path) -> Iterator[tuple[Mute, Path]]:
    """The proxy, and a kubeconfig that leads through it."""
    loaded = yaml.safe_load(kube.kubeconfig.read_text())
    proxy, started, ended = Mute(loaded["clusters"][0]["cluster"]["server"]), threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(proxy.serve(started, ended)), daemon=True)
    thread.start()
    assert started.wait(10)
    loaded["clusters"][0]["cluster"]["server"] = f"https://127.0.0.1:{proxy.port}"
    written = folder / "proxied.kubeconfig"
    written.write_text(yaml.safe_dump(loaded))
    try:
        yield proxy, written
    finally:
        ended.set()
        thread.join(10)


def test_a_watch_on_a_socket_that_stays_silent_fails_the_liveness_probe(
    kube: Kubernetes, namespace: str, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"resync_s": 1, "api_limit_s": 2, "silence_limit_s": 3}
    with (
        mute_proxy(kube, tmp_path) as (proxy, kubeconfig),
        running_operator(kube, namespaces=(namespace,), kubeconfig=kubeconfig, **settings) as operator,
    ):
        kube.request("POST", pool_path(namespace), manifest("llama", raw_spec(replicas=1)))
        eventually(lambda: workers_wanted(kube, namespace) == 1, what="the pool")
        eventually(lambda: operator.said("healthz") == (200, "ok\n"), what="a watch that shows what lists show")
        proxy.mute()
        set_replicas(kube, namespace, 2)
        # The regular look, on connections of its own, does the work; the kubelet is asked to start the process anew.
        eventually(lambda: workers_wanted(kube, namespace) == 2, what="a regular look")
        eventually(lambda: "the watch has been silent for" in operator.said("healthz")[1], what="the probe's failure")
        assert operator.probe("healthz") == 503
        proxy.release()
