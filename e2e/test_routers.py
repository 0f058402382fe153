"""More than one router."""

from __future__ import annotations

from contextlib import ExitStack

from e2e.cluster import eventually
from e2e.pool import Pool, cached_tokens, chat

_TEXT = "Two routers share nothing, and yet both know where a prefix lies. " * 12


def test_what_one_router_makes_an_engine_cache_the_other_knows(pair: Pool) -> None:
    pool, cluster = pair, pair.cluster
    workers = pool.pod_names("worker")
    pool.patch({"router": {"replicas": 2}})
    eventually("there are two routers", lambda: len(pool.pod_names("router")) == 2, patience_s=30)
    pool.wait_until_good(workers=2)
    assert pool.pod_names("worker") == workers

    with ExitStack() as stack:
        first, second = (
            stack.enter_context(cluster.forwarded(pool.namespace, f"pod/{pod}", 8080))
            for pod in sorted(pool.pod_names("router"))
        )
        before = _digests(pool, second)
        status, answer = chat(first, _TEXT)
        assert status == 200, answer
        eventually("the second router knows of the prefix", lambda: _digests(pool, second) != before, patience_s=30)
        eventually("both know the same", lambda: _digests(pool, first) == _digests(pool, second), patience_s=30)
        status, answer = chat(second, _TEXT)

    assert status == 200
    assert cached_tokens(answer) == answer["usage"]["prompt_tokens"] - 1


def _digests(pool: Pool, url: str) -> dict[str, str]:
    return {name: str(worker["digest"]) for name, worker in pool.believed_workers(url).items()}
