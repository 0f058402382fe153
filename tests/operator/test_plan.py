"""The plan: what is kept when nothing needs to change, and which worker goes first."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouting_operator.observed import Observed
from kvrouting_operator.plan import Plan
from kvrouting_operator.pool import Images, parse_spec
from kvrouting_operator.resources.names import (
    DELETION_COST_ANNOTATION,
    INPUTS_ANNOTATION,
    ROUTER,
    TEMPLATE_ANNOTATION,
)
from kvrouting_operator.spec import PoolSpec
from tests.operator.pools import (
    live_deployment,
    live_pod,
    objects_of,
    observed_of,
    planned,
    pool_report,
    report_of,
    spec_of,
)
from tests.operator.spec_table import ACCEPTED

NEWER = Images(sglang="sglang:2", simulated="simulated:2", plugin="plugin:2", sidecar="sidecar:2", router="router:2")


def after(plan: Plan, **parts: Any) -> Observed:
    """What is seen when a plan has been applied."""
    owned = {}
    for body in plan.objects:
        replicas = body.get("spec", {}).get("replicas", 0)
        live = live_deployment(body, replicas=replicas) if body["kind"] == "Deployment" else body
        owned[body["kind"], body["metadata"]["name"]] = live
    return observed_of(owned=owned, **parts)


def template(plan: Plan, name: str) -> Any:
    """Of a Deployment in a plan."""
    return next(o for o in plan.objects if (o["kind"], o["metadata"]["name"]) == ("Deployment", name))["spec"][
        "template"
    ]


@pytest.mark.parametrize("name", ACCEPTED)
def test_a_plan_that_was_applied_is_planned_again(name: str) -> None:
    spec = parse_spec(ACCEPTED[name])
    first = planned(spec)
    assert planned(spec, after(first)) == first


def test_routers_of_a_pool_without_workers_can_be_replaced() -> None:
    """None of them is ready, so none would ever go if one had to be."""
    for replicas, missing in ((0, "100%"), (1, 0)):
        strategy = objects_of(spec_of(replicas=replicas))["Deployment", "llama-router"]["spec"]["strategy"]
        assert strategy["rollingUpdate"]["maxUnavailable"] == missing


def test_a_new_operator_alone_replaces_no_pod() -> None:
    first = planned(spec_of())
    assert planned(spec_of(), after(first), images=NEWER) == first


def test_a_new_cluster_version_alone_replaces_no_pod() -> None:
    first = planned(spec_of(), observed_of(native_sidecar=False))
    assert planned(spec_of(), after(first, native_sidecar=True)) == first


def test_the_trigger_renders_all_pods_anew() -> None:
    first = planned(spec_of())
    again = planned(spec_of(rollout={"trigger": "now"}), after(first), images=NEWER)
    assert template(again, "llama-worker")["spec"]["containers"][0]["image"] == "sglang:2"
    assert template(again, "llama-router")["spec"]["containers"][0]["image"] == "router:2"


def test_a_change_of_the_router_leaves_the_workers_as_an_older_operator_made_them() -> None:
    first = planned(spec_of())
    again = planned(spec_of(router={"args": ["--max-waiting=3"]}), after(first), images=NEWER)
    assert template(again, "llama-worker") == template(first, "llama-worker")
    assert template(again, "llama-router") != template(first, "llama-router")


def test_other_keys_replace_all_pods() -> None:
    from kvrouting_operator.plan import plan
    from kvrouting_operator.pool import PoolKeys
    from tests.operator.pools import IMAGES

    first = planned(spec_of())
    keys = PoolKeys(hash_key="cd" * 32, join_token="other", drain_token="other")
    again = plan(spec_of(), after(first), keys=keys, images=IMAGES)
    for name in ("llama-worker", "llama-router"):
        assert template(again, name) != template(first, name)


def test_a_template_is_kept_with_what_it_was_rendered_from() -> None:
    body = objects_of(spec_of())["Deployment", "llama-worker"]
    annotations = body["metadata"]["annotations"]
    assert json.loads(annotations[TEMPLATE_ANNOTATION]) == body["spec"]["template"]
    other = objects_of(spec_of(engine={"pageSize": 4}))["Deployment", "llama-worker"]
    assert other["metadata"]["annotations"][INPUTS_ANNOTATION] != annotations[INPUTS_ANNOTATION]


def test_scaling_and_service_change_no_template() -> None:
    first = planned(spec_of())
    again = planned(spec_of(replicas=9, router={"replicas": 3, "service": {"port": 81}}), after(first), images=NEWER)
    for name in ("llama-worker", "llama-router"):
        assert template(again, name) == template(first, name)


@pytest.mark.parametrize("ready", [True, False])
def test_the_service_leads_to_unready_routers_only_while_none_is_ready(ready: bool) -> None:
    routers = (
        live_pod("llama-router-1", component=ROUTER, ready=ready),
        live_pod("llama-router-2", component=ROUTER, ready=False),
    )
    objects = objects_of(spec_of(), observed_of(router_pods=routers))
    assert objects["Service", "llama-router"]["spec"]["publishNotReadyAddresses"] is not ready
    assert objects["Service", "llama-sync"]["spec"]["publishNotReadyAddresses"] is True


def shrinking(spec: PoolSpec, *, replicas: int, **parts: Any) -> Observed:
    """A pool whose Deployment has more replicas than the spec wants."""
    body = objects_of(spec)["Deployment", "llama-worker"]
    body["spec"]["replicas"] = replicas
    return observed_of(owned={("Deployment", "llama-worker"): live_deployment(body, replicas=replicas)}, **parts)


def costs(plan: Plan) -> dict[str, int]:
    """Pod → cost."""
    return {cost.pod: cost.cost for cost in plan.costs}


def test_the_coldest_worker_goes_first() -> None:
    pods = tuple(live_pod(name) for name in ("a", "b", "c", "d"))
    report = pool_report(
        a=report_of(in_flight=1, unique_cached_tokens=0),
        b=report_of(in_flight=0, unique_cached_tokens=900),
        c=report_of(in_flight=0, unique_cached_tokens=10),
    )
    observed = shrinking(spec_of(replicas=1), replicas=4, worker_pods=pods, report=report)
    assert costs(planned(spec_of(replicas=1), observed)) == {"d": 0, "c": 1, "b": 2, "a": 3}


def test_costs_are_written_only_while_workers_go() -> None:
    pods = (live_pod("a"), live_pod("b"))
    observed = shrinking(spec_of(replicas=2), replicas=2, worker_pods=pods, report=pool_report(a=report_of()))
    assert planned(spec_of(replicas=2), observed).costs == ()


def test_a_cost_that_a_pod_has_is_not_written_again() -> None:
    first, second = live_pod("a"), live_pod("b")
    first["metadata"]["annotations"] = {DELETION_COST_ANNOTATION: "0"}
    second["metadata"]["annotations"] = {DELETION_COST_ANNOTATION: "7"}
    report = pool_report(a=report_of(in_flight=0), b=report_of(in_flight=5))
    observed = shrinking(spec_of(replicas=1), replicas=2, worker_pods=(first, second), report=report)
    assert costs(planned(spec_of(replicas=1), observed)) == {"b": 1}


def test_a_worker_that_leaves_already_has_no_cost() -> None:
    leaving = live_pod("a")
    leaving["metadata"]["deletionTimestamp"] = "2030-01-01T00:00:00Z"
    observed = shrinking(spec_of(replicas=1), replicas=3, worker_pods=(leaving, live_pod("b")))
    assert costs(planned(spec_of(replicas=1), observed)) == {"b": 0}


@given(loads=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=2, max_size=6))
def test_no_busier_worker_goes_before_a_calmer_one(loads: list[tuple[int, int]]) -> None:
    names = [f"p{number}" for number in range(len(loads))]
    reports = {
        name: report_of(in_flight=busy, unique_cached_tokens=warm)
        for name, (busy, warm) in zip(names, loads, strict=True)
    }
    pods = tuple(live_pod(name) for name in names)
    observed = shrinking(spec_of(replicas=1), replicas=len(names), worker_pods=pods, report=pool_report(**reports))
    written = costs(planned(spec_of(replicas=1), observed))
    assert sorted(written.values()) == list(range(len(names)))
    order = sorted(names, key=lambda name: written[name])
    load = dict(zip(names, loads, strict=True))
    assert [load[name] for name in order] == sorted(loads)
