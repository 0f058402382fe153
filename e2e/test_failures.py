"""Pods that are killed."""

from __future__ import annotations

import asyncio
import json

from e2e.cluster import Object, eventually
from e2e.conftest import Release
from e2e.pool import READY_S, Pool, cached_tokens, chat
from e2e.streams import steady_load

# A text of its own in each module: they share a pool.
_TEXT = "Once upon a time there was a prefix that many requests had in common. " * 12
# From its first word to the last worker's snapshot: what a router may take to know every cache again.
WARM_S = 5.0


def _kill(pool: Pool, pod: str) -> None:
    pool.kubectl("delete", "pod", pod, "--force", "--grace-period=0")


def test_a_killed_worker_fails_no_new_request_and_is_replaced(pair: Pool) -> None:
    pool = pair
    victim = min(pool.pod_names("worker"))

    with pool.router() as url:
        _kill(pool, victim)
        for number in range(10):
            status, answer = chat(url, f"{number} asks while a worker is gone")
            assert status == 200, answer
        pool.wait_until_good(workers=2)
        assert set(pool.believed_workers(url)) >= pool.pod_names("worker")

    assert victim not in pool.pod_names("worker")
    body = pool.body()
    assert victim not in {worker["pod"] for worker in body["status"]["workers"]}


def test_a_killed_router_is_warm_again_within_seconds_of_its_start(pair: Pool) -> None:
    pool = pair
    with pool.router() as url:
        assert chat(url, _TEXT)[0] == 200
    (victim,) = pool.pod_names("router")

    _kill(pool, victim)

    successor = eventually("another router is ready", lambda: _ready_router(pool, not_=victim), patience_s=READY_S)
    eventually(
        "it knows both workers", lambda: len(_lines(pool, successor, "worker joined the sync")) >= 2, patience_s=30
    )
    pool.wait_until_good(workers=2)
    with pool.router() as url:
        status, answer = chat(url, _TEXT)
    assert status == 200
    assert cached_tokens(answer) == answer["usage"]["prompt_tokens"] - 1
    (start,) = _lines(pool, successor, "listening")
    live = [line for line in _lines(pool, successor, "worker state") if line["to"] == "live"]
    assert live[1]["ts"] - start["ts"] <= WARM_S


def _ready_router(pool: Pool, *, not_: str) -> str | None:
    for pod in pool.pods("router"):
        conditions = {c["type"]: c["status"] for c in pod["status"].get("conditions", [])}
        if pod["metadata"]["name"] != not_ and conditions.get("Ready") == "True":
            return str(pod["metadata"]["name"])
    return None


def _lines(pool: Pool, pod: str, event: str) -> list[Object]:
    lines = [json.loads(line) for line in pool.kubectl("logs", pod).splitlines() if line.startswith("{")]
    return [line for line in lines if line["event"] == event]


async def test_an_operator_killed_in_the_middle_of_a_change_finishes_it(pair: Pool, release: Release) -> None:
    pool = pair
    before = pool.pod_names("worker")

    with pool.router() as url:
        async with steady_load(url, clients=2, max_tokens=16) as load:
            await asyncio.to_thread(_change_and_kill_operator, pool, release, before)
            await asyncio.to_thread(pool.wait_until_good, workers=3)

    assert load.faults == []
    assert load.answered > 0
    assert not before & pool.pod_names("worker")
    for pod in pool.pods("worker"):
        (engine,) = (c for c in pod["spec"]["containers"] if c["name"] == "engine")
        assert "--own-answer-tokens=65" in engine["args"]


def _change_and_kill_operator(pool: Pool, release: Release, before: set[str]) -> None:
    """While the first worker leaves, the operator is killed; what is left of the change comes when it is away."""
    pool.patch({"engine": {"args": ["--own-answer-tokens=65"]}})
    eventually("a worker leaves", lambda: before - pool.pod_names("worker"), patience_s=30)
    release.cluster.kubectl(
        *("--namespace", release.namespace, "delete", "pod", "--force", "--grace-period=0"),
        *("--selector", "app.kubernetes.io/component=operator"),
    )
    pool.patch({"replicas": 3})
