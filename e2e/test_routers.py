"""More than one router."""

from __future__ import annotations

from contextlib import ExitStack

from e2e.cluster import Cluster, eventually
from e2e.pool import Pool, cached_tokens, chat, simulated_pool

_TEXT = "Two routers share nothing, and yet both know where a prefix lies. " * 12


def test_what_one_router_makes_an_engine_cache_the_other_knows(cluster: Cluster, namespace: str) -> None:
    pool = Pool(cluster=cluster, name="p", namespace=namespace)
    cluster.apply(simulated_pool(pool.name, namespace, replicas=2, router={"replicas": 2}))
    pool.wait_until_good(workers=2)

    with ExitStack() as stack:
        first, second = (
            stack.enter_context(cluster.forwarded(namespace, f"pod/{pod}", 8080))
            for pod in sorted(pool.pod_names("router"))
        )
        status, answer = chat(first, _TEXT)
        assert status == 200, answer
        eventually("the second router knows of the prefix", lambda: _all_blocks(pool, second), patience_s=30)
        eventually("both know the same", lambda: _digests(pool, first) == _digests(pool, second), patience_s=30)
        status, answer = chat(second, _TEXT)

    assert status == 200
    assert cached_tokens(answer) == answer["usage"]["prompt_tokens"] - 1


def _all_blocks(pool: Pool, url: str) -> int:
    return sum(int(worker["blocks"]) for worker in pool.believed_workers(url).values())


def _digests(pool: Pool, url: str) -> dict[str, str]:
    return {name: str(worker["digest"]) for name, worker in pool.believed_workers(url).items()}
