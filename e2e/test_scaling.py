"""More workers, fewer workers, none."""

from __future__ import annotations

import asyncio

from e2e.cluster import Cluster, eventually
from e2e.pool import READY_S, Pool, chat, simulated_pool
from e2e.streams import live_streams

STREAMS = 20
# At the pace of an L40 about half a minute: all are under way when the workers are told to go.
TOKENS = 600


async def test_workers_go_without_cutting_a_stream_and_the_coldest_goes_first(pair: Pool) -> None:
    pool = pair
    pool.kubectl("scale", f"kvp/{pool.name}", "--replicas=3")
    body = pool.wait_until_good(workers=3)
    assert body["spec"]["replicas"] == body["status"]["replicas"] == 3

    with pool.router() as url:
        async with live_streams(url, number=STREAMS, max_tokens=TOKENS) as streams:
            believed = await asyncio.to_thread(_all_under_way, pool, url)
            warmest = max(believed, key=lambda name: _warmth(believed[name], name))
            await asyncio.to_thread(pool.patch, {"replicas": 1})
            await asyncio.to_thread(
                eventually, "one stays", lambda: pool.pod_names("worker") == {warmest}, patience_s=30
            )
            assert not any(task.done() for task in streams)
            draining = await asyncio.to_thread(pool.wait_for_condition, "Draining", "True", patience_s=30)
            results = await asyncio.gather(*streams)

    assert "requests under way" in draining["message"]
    assert [r.fault for r in results if r.fault] == []
    assert {r.tokens for r in results} == {TOKENS}
    pool.wait_until_good(workers=1)


def _all_under_way(pool: Pool, url: str) -> dict[str, tuple[int, int]]:
    def found() -> dict[str, tuple[int, int]] | None:
        workers = pool.believed_workers(url)
        seen = {name: (int(w["in_flight"]), int(w["unique_blocks"])) for name, w in workers.items()}
        return seen if sum(in_flight for in_flight, _ in seen.values()) == STREAMS else None

    return eventually("all streams are under way", found, patience_s=30)


def _warmth(seen: tuple[int, int], name: str) -> tuple[int, int, str]:
    return (*seen, name)


def test_a_pool_without_workers_answers_503_and_comes_back(cluster: Cluster, namespace: str) -> None:
    pool = Pool(cluster=cluster, name="p", namespace=namespace)
    cluster.apply(simulated_pool(pool.name, namespace, replicas=0))
    ready = pool.wait_for_condition("Ready", "False")
    assert ready["reason"] == "ScaledToZero"
    pool.wait_for_condition("RouterAvailable", "True")

    with pool.router() as url:
        status, answer = chat(url, "is anybody there?")
        assert status == 503
        assert answer["error"]["message"]

        pool.kubectl("scale", "kvp/p", "--replicas=1")
        pool.wait_until_good(workers=1)
        status, answer = chat(url, "is anybody there?")
        assert status == 200, answer

        pool.kubectl("scale", "kvp/p", "--replicas=0")
        eventually("no worker is left", lambda: not pool.pod_names("worker"), patience_s=READY_S)
        status = eventually("503 again", lambda: chat(url, "and now?")[0] == 503 and 503, patience_s=60)
        assert status == 503
