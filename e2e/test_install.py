"""helm install, and the first requests."""

from __future__ import annotations

from e2e.cluster import Cluster
from e2e.conftest import Release
from e2e.pool import CONDITIONS, Pool, cached_tokens, chat, simulated_pool


def test_a_pool_from_values_becomes_ready_with_every_condition(release: Release) -> None:
    body = release.pool.wait_until_good(workers=1)

    conditions = {c["type"]: c for c in body["status"]["conditions"]}
    assert set(conditions) == set(CONDITIONS)
    assert all(c["reason"] for c in conditions.values())
    assert body["status"]["endpoint"] == f"http://first-router.{release.namespace}.svc:80"
    assert [w["mirror"] for w in body["status"]["workers"]] == ["exact"]
    assert {w["evictionPolicy"] for w in body["status"]["workers"]} == {"rlt-adaptive"}


def test_the_second_request_finds_its_prefix_cached(release: Release) -> None:
    release.pool.wait_until_good(workers=1)
    text = "What is a radix tree, and why would a cache of prefixes be one? " * 10

    with release.pool.router() as url:
        status, first = chat(url, text)
        assert status == 200, first
        _, second = chat(url, text)

    assert first["choices"][0]["message"]["content"]
    assert cached_tokens(second) == second["usage"]["prompt_tokens"] - 1
    assert cached_tokens(first) < 64


def test_helm_test_sends_a_request_through_each_pool(release: Release) -> None:
    release.pool.wait_until_good(workers=1)

    said = release.cluster.helm("test", release.name, "--namespace", release.namespace, "--logs")

    assert "Phase:          Succeeded" in said
    assert f"http://first-router.{release.namespace}.svc:80 second:" in said


def test_two_pools_of_a_namespace_serve_and_never_meet(cluster: Cluster, namespace: str) -> None:
    pools = [Pool(cluster=cluster, name=name, namespace=namespace) for name in ("chat", "chat-worker")]
    cluster.apply(*(simulated_pool(pool.name, namespace, replicas=1) for pool in pools))

    for pool in pools:
        pool.wait_until_good(workers=1)
        with pool.router() as url:
            status, answer = chat(url, f"a question for {pool.name}")
            assert status == 200, answer
            believed = pool.believed_workers(url)
        assert set(believed) == pool.pod_names("worker")
