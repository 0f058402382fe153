"""Secrets that a pool uses and does not own change under it."""

from __future__ import annotations

import json

from e2e.cluster import Cluster, Object, eventually
from e2e.pool import Pool, chat, simulated_pool


def _secret(namespace: str, *keys: str) -> Object:
    metadata = {"name": "clients", "namespace": namespace}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": {"keys": "\n".join(keys)}}


def _statuses(url: str, *keys: str) -> list[int]:
    return [chat(url, "may I?", headers={"Authorization": f"Bearer {key}"})[0] for key in keys]


def test_a_new_api_key_is_taken_and_an_old_one_is_not_without_a_new_pod(cluster: Cluster, namespace: str) -> None:
    pool = Pool(cluster=cluster, name="p", namespace=namespace)
    router = {"apiKeysSecret": {"name": "clients", "key": "keys"}}
    cluster.apply(_secret(namespace, "old"), simulated_pool(pool.name, namespace, replicas=1, router=router))
    pool.wait_until_good(workers=1)
    pods = pool.pod_names("router") | pool.pod_names("worker")

    with pool.router() as url:
        assert _statuses(url, "old", "new") == [200, 401]
        cluster.apply(_secret(namespace, "new"))
        # The kubelet looks at a pod's Secrets each minute or so, and at once when the pod's object has changed.
        (pod,) = pool.pod_names("router")
        pool.kubectl("patch", "pod", pod, "--patch", json.dumps({"metadata": {"annotations": {"looked-at": "now"}}}))
        eventually("the keys are exchanged", lambda: _statuses(url, "old", "new") == [401, 200], patience_s=150)

    # The operator reads the routers' pages with a key of the same Secret.
    pool.wait_until_good(workers=1)
    assert pool.pod_names("router") | pool.pod_names("worker") == pods
