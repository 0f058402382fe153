"""A pool that is not what it should be says so, and why."""

from __future__ import annotations

import pytest

from e2e.cluster import Cluster, CommandError, condition
from e2e.pool import Pool, chat, simulated_pool


def test_engines_without_what_the_pool_needs_are_never_ready(cluster: Cluster, namespace: str) -> None:
    told = {"plain": ["--no-state"], "other": ["--eviction=lru"], "mute": ["--no-kv-events", "--no-replay"]}
    pools = {name: Pool(cluster=cluster, name=name, namespace=namespace) for name in told}
    cluster.apply(*(simulated_pool(name, namespace, replicas=1, engine={"args": args}) for name, args in told.items()))

    unproven = pools["plain"].wait_for_condition("EvictionPolicyActive", "False")
    assert unproven["reason"] == "NotProven"
    other = pools["other"].wait_for_condition("EvictionPolicyActive", "False")
    assert (other["reason"], "evicts by lru, wanted is rlt-adaptive" in other["message"]) == ("OtherPolicy", True)
    mute = pools["mute"].wait_for_condition("EventsFlowing", "False")
    assert mute["reason"] == "NoEvents"
    for pool in pools.values():
        assert condition(pool.body(), "Ready")["status"] == "False"
        assert pool.body()["status"].get("readyReplicas", 0) == 0
    # Routers know these workers, and send them nothing.
    for name in ("plain", "other"):
        with pools[name].router() as url:
            (believed,) = pools[name].believed_workers(url).values()
            assert (believed["state"], "does not prove" in believed["reason"]) == ("suspect", True)
            status, answer = chat(url, "is anybody there?")
            assert status == 503, answer


def test_a_bad_spec_is_refused_with_the_reason(cluster: Cluster, namespace: str) -> None:
    bad = {
        "needs engine.runtime simulated": {"engine": {"runtime": "sglang"}},
        "should be less than or equal to 1000": {"replicas": 1001},
        "unknown field": {"replica": 1},
        "which the pool sets itself": {"engine": {"runtime": "simulated", "args": ["--port=1"]}},
        "unsupported value": {"gpu": {"class": "L400", "count": 0}},
    }
    for reason, change in bad.items():
        body = simulated_pool("p", namespace, replicas=1)
        body["spec"].update(change)
        with pytest.raises(CommandError, match=f"(?i){reason}"):
            cluster.apply(body)
