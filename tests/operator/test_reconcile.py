"""One round: observe, plan, apply, status. Nothing is done twice, nothing of others is touched."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pytest

from kvrouting_operator.apply import holds
from kvrouting_operator.cluster import RejectedError, UnavailableError
from kvrouting_operator.crd import KIND
from kvrouting_operator.observe import Observer
from kvrouting_operator.pool import Object, PoolKey
from kvrouting_operator.reconcile import Outcome, Reconciler
from kvrouting_operator.resources.names import ROUTER
from tests.operator.fake_cluster import FakeCluster, FakeRouters, as_cluster
from tests.operator.pools import IMAGES, SIMULATED, live_pod, pool_report, raw_pool, raw_spec, report_of

KEY = PoolKey(namespace="default", name="llama")


def operator_of(fake: FakeCluster, routers: FakeRouters | None = None) -> Reconciler:
    """Keys are numbered, and it is always the same moment."""
    numbers = iter(range(1000))
    observer = Observer(
        cluster=as_cluster(fake), fetch=routers or FakeRouters(), random_hex=lambda size: f"{next(numbers):02x}" * size
    )
    moment = dt.datetime(2030, 1, 1, tzinfo=dt.UTC)
    return Reconciler(cluster=as_cluster(fake), observer=observer, images=IMAGES, now=lambda: moment)


def writes(fake: FakeCluster) -> list[tuple[str, str]]:
    """What was written."""
    return [request for request in fake.requests if request[0] not in ("get", "list")]


def condition(fake: FakeCluster, kind: str) -> dict[str, Any]:
    """Of the pool."""
    (pool,) = fake.of_kind(KIND)
    return next(c for c in pool["status"]["conditions"] if c["type"] == kind)


def test_a_pool_gets_everything_that_it_needs() -> None:
    fake = FakeCluster(raw_pool())
    assert operator_of(fake).reconcile(KEY) == Outcome(settled=False)
    kinds = [kind for kind, _, name in fake.objects if kind not in (KIND, "Event")]
    assert sorted(kinds) == sorted(
        ["Secret", "Deployment", "Deployment", "Service", "Service", "ServiceAccount", "ServiceAccount",
         "NetworkPolicy", "NetworkPolicy", "PodDisruptionBudget", "PodDisruptionBudget"]
    )  # fmt: skip


def test_a_second_round_writes_nothing() -> None:
    fake = FakeCluster(raw_pool())
    operator = operator_of(fake)
    operator.reconcile(KEY)
    operator.reconcile(KEY)
    fake.requests.clear()
    operator.reconcile(KEY)
    assert writes(fake) == []


def test_keys_are_made_once() -> None:
    fake = FakeCluster(raw_pool())
    operator_of(fake).reconcile(KEY)
    (secret,) = fake.of_kind("Secret")
    operator_of(fake).reconcile(KEY)
    assert fake.of_kind("Secret") == [secret]


def test_what_somebody_dropped_comes_back() -> None:
    fake = FakeCluster(raw_pool())
    operator = operator_of(fake)
    operator.reconcile(KEY)
    del fake.objects["Service", "default", "llama-sync"]
    fake.objects["NetworkPolicy", "default", "llama-worker"]["spec"]["ingress"] = []
    operator.reconcile(KEY)
    assert ("Service", "default", "llama-sync") in fake.objects
    assert fake.objects["NetworkPolicy", "default", "llama-worker"]["spec"]["ingress"] != []


def test_a_users_field_is_not_taken_and_the_conflict_is_told() -> None:
    fake = FakeCluster(raw_pool())
    operator = operator_of(fake)
    operator.reconcile(KEY)
    fake.objects["Deployment", "default", "llama-worker"]["spec"]["replicas"] = 7
    fake.taken["Deployment", "llama-worker"] = {"replicas"}
    assert operator.reconcile(KEY) == Outcome(settled=False, stuck=True)
    assert fake.objects["Deployment", "default", "llama-worker"]["spec"]["replicas"] == 7
    assert condition(fake, "Progressing")["reason"] == "FieldConflict"
    assert "kubectl-edit" in condition(fake, "Progressing")["message"]
    assert any(e["type"] == "Warning" and e["reason"] == "FieldConflict" for e in fake.of_kind("Event"))


@pytest.mark.parametrize("kind", ["Service", "Secret"])
def test_an_object_of_somebody_else_is_left_alone(kind: str) -> None:
    name = {"Service": "llama-router", "Secret": "llama-keys"}[kind]
    foreign: Object = {
        "kind": kind,
        "metadata": {"name": name, "namespace": "default", "uid": "u"},
        "spec": {"mine": True},
    }
    fake = FakeCluster(raw_pool(), foreign)
    operator_of(fake).reconcile(KEY)
    assert fake.objects[kind, "default", name]["spec"] == {"mine": True}
    assert condition(fake, "Progressing")["reason"] == "NameTaken"
    assert name in condition(fake, "Progressing")["message"]


def test_objects_of_an_earlier_pool_of_the_name_are_waited_out() -> None:
    fake = FakeCluster(raw_pool())
    operator_of(fake).reconcile(KEY)
    fake.objects[KIND, "default", "llama"]["metadata"]["uid"] = "another"
    operator_of(fake).reconcile(KEY)
    assert condition(fake, "Progressing")["reason"] == "NameTaken"
    for key in [key for key in fake.objects if key[0] not in (KIND, "Event")]:
        del fake.objects[key]
    operator_of(fake).reconcile(KEY)
    operator_of(fake).reconcile(KEY)
    assert condition(fake, "Progressing")["reason"] != "NameTaken"


@pytest.mark.parametrize("spec", [{"model": {"name": "m"}}, raw_spec(podTemplate={"spec": {"hostNetwork": True}})])
def test_a_broken_spec_makes_a_condition_and_nothing_else(spec: dict[str, Any]) -> None:
    fake = FakeCluster(raw_pool(spec=spec))
    assert operator_of(fake).reconcile(KEY) == Outcome(settled=False, stuck=True)
    assert condition(fake, "Progressing")["reason"] == "InvalidSpec"
    assert fake.of_kind("Deployment") == []


def test_a_spec_that_breaks_leaves_what_runs() -> None:
    fake = FakeCluster(raw_pool())
    operator = operator_of(fake)
    operator.reconcile(KEY)
    before = fake.of_kind("Deployment")
    fake.objects[KIND, "default", "llama"]["spec"]["gpu"]["class"] = "A100"
    operator.reconcile(KEY)
    assert fake.of_kind("Deployment") == before
    assert "A100" in condition(fake, "Progressing")["message"]


def test_what_the_api_server_refuses_is_told_and_the_rest_is_applied() -> None:
    fake = FakeCluster(raw_pool())
    fake.failing["apply", "NetworkPolicy"] = RejectedError("forbidden: no")
    assert operator_of(fake).reconcile(KEY) == Outcome(settled=False, stuck=True)
    assert condition(fake, "Progressing")["reason"] == "Rejected"
    assert len(fake.of_kind("Deployment")) == 2


def test_an_api_server_that_is_away_is_the_queues_affair() -> None:
    fake = FakeCluster(raw_pool())
    fake.failing["list", "Deployment"] = UnavailableError("503")
    with pytest.raises(UnavailableError):
        operator_of(fake).reconcile(KEY)


@pytest.mark.parametrize("gone", [True, False])
def test_a_pool_that_goes_is_left_to_the_garbage_collector(gone: bool) -> None:
    pool = raw_pool()
    pool["metadata"]["deletionTimestamp"] = "2030-01-01T00:00:00Z"
    fake = FakeCluster() if gone else FakeCluster(pool)
    assert operator_of(fake).reconcile(KEY) is None
    assert writes(fake) == []


def test_the_coldest_worker_is_marked_before_the_deployment_shrinks() -> None:
    fake = FakeCluster(raw_pool(spec=raw_spec(replicas=2)))
    routers = FakeRouters(pool_report(a=report_of(in_flight=3), b=report_of(in_flight=0)))
    operator = operator_of(fake, routers)
    operator.reconcile(KEY)
    for pod in (live_pod("a"), live_pod("b"), live_pod("r", component=ROUTER)):
        fake.objects[fake.key(pod)] = pod
    fake.objects[KIND, "default", "llama"]["spec"]["replicas"] = 1
    fake.requests.clear()
    operator.reconcile(KEY)
    pods, deployment = writes(fake).index(("apply", "Pod")), writes(fake).index(("apply", "Deployment"))
    assert pods < deployment
    cost = "controller.kubernetes.io/pod-deletion-cost"
    assert fake.objects["Pod", "default", "b"]["metadata"]["annotations"][cost] == "0"
    assert fake.objects["Pod", "default", "a"]["metadata"]["annotations"][cost] == "1"


def test_every_router_is_asked_with_a_key_that_it_knows() -> None:
    secret = {
        "kind": "Secret",
        "metadata": {"name": "keys", "namespace": "default"},
        "data": {"api": "a2V5LTEKa2V5LTIK"},
    }
    spec = raw_spec(SIMULATED, router={"replicas": 2, "apiKeysSecret": {"name": "keys", "key": "api"}})
    routers = FakeRouters()
    pods = [live_pod(f"r-{n}", component=ROUTER, podIP=f"10.0.0.{n}") for n in (1, 2)]
    operator_of(FakeCluster(raw_pool(spec=spec), secret, *pods), routers).reconcile(KEY)
    (asked,) = routers.asked
    assert [(a.url, a.api_key) for a in asked] == [("http://10.0.0.1:8080", "key-1"), ("http://10.0.0.2:8080", "key-1")]


def test_a_missing_secret_of_keys_is_told() -> None:
    spec = raw_spec(router={"apiKeysSecret": {"name": "keys", "key": "api"}})
    fake = FakeCluster(raw_pool(spec=spec))
    operator_of(fake).reconcile(KEY)
    assert condition(fake, "Progressing")["reason"] == "SecretMissing"


def test_a_live_object_may_hold_more_than_was_wanted() -> None:
    assert holds({"a": 1, "b": 2}, {"a": 1})
    assert holds({"a": [{"x": 1, "y": 2}]}, {"a": [{"x": 1}]})
    assert holds({}, {"a": [], "b": False})
    assert not holds({"a": [1, 2]}, {"a": [1]})
    assert not holds({}, {"a": 1})
    assert not holds({"a": 2}, {"a": 1})
