"""podTemplate: everything that a pod can carry passes through, and what would break the pool is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouting_operator.pool import InvalidSpecError
from kvrouting_operator.strategic_merge import MergeError, merged
from tests.operator.pools import container, router_pod_of, spec_of, worker_pod_of

PASSES: dict[str, dict[str, Any]] = {
    "labels": {"metadata": {"labels": {"team": "a"}, "annotations": {"note": "b"}}},
    "pull secrets": {"spec": {"imagePullSecrets": [{"name": "registry"}]}},
    "affinity": {"spec": {"affinity": {"nodeAffinity": {"x": "y"}}}},
    "priority": {"spec": {"priorityClassName": "high", "schedulerName": "mine", "serviceAccountName": "other"}},
    "more containers": {"spec": {"containers": [{"name": "logs", "image": "fluent"}]}},
    "more init containers": {"spec": {"initContainers": [{"name": "fetch", "image": "curl"}]}},
    "volumes": {"spec": {"volumes": [{"name": "extra", "nfs": {"server": "s", "path": "/"}}]}},
    "security": {"spec": {"securityContext": {"runAsUser": 1000, "fsGroup": 1000}}},
    "tolerations": {"spec": {"tolerations": [{"operator": "Exists"}]}},
}


@pytest.mark.parametrize("name", PASSES)
def test_what_a_pod_can_carry_passes_through(name: str) -> None:
    override = PASSES[name]
    pod = worker_pod_of(spec_of(podTemplate=override))
    assert merged(pod, override) == pod
    assert {c["name"] for c in pod["spec"]["containers"]} >= {"engine"}
    assert router_pod_of(spec_of(podTemplate=override)) == router_pod_of(spec_of())


def test_our_containers_can_be_given_mounts_and_variables() -> None:
    more = {
        "name": "engine",
        "env": [{"name": "NCCL_DEBUG", "value": "INFO"}],
        "volumeMounts": [{"name": "extra", "mountPath": "/extra"}],
        "securityContext": {"privileged": True},
    }
    engine = container(worker_pod_of(spec_of(podTemplate={"spec": {"containers": [more]}})), "engine")
    plain = container(worker_pod_of(spec_of()), "engine")
    assert engine["env"] == [*plain["env"], *more["env"]]
    assert engine["volumeMounts"] == [*plain["volumeMounts"], *more["volumeMounts"]]
    assert engine["securityContext"] == {**plain["securityContext"], "privileged": True}


def _engine(**fields: Any) -> dict[str, Any]:
    return {"spec": {"containers": [{"name": "engine", **fields}]}}


BREAKS: dict[str, tuple[dict[str, Any], str]] = {
    "host network": ({"spec": {"hostNetwork": True}}, "podTemplate.spec.hostNetwork"),
    "service links": ({"spec": {"enableServiceLinks": True}}, "podTemplate.spec.enableServiceLinks"),
    "grace": ({"spec": {"terminationGracePeriodSeconds": 5}}, "set drain.timeoutSeconds"),
    "restart policy": ({"spec": {"restartPolicy": "Never"}}, "podTemplate.spec.restartPolicy"),
    "node selector": ({"spec": {"nodeSelector": {"a": "b"}}}, "set gpu.nodeSelector"),
    "pool label": ({"metadata": {"labels": {"kvrouting.dev/pool": "x"}}}, "podTemplate.metadata.labels"),
    "name": ({"metadata": {"name": "x"}}, "podTemplate.metadata.name"),
    "image": (_engine(image="x"), "podTemplate.spec.containers[engine].image"),
    "command": (_engine(command=["x"]), "podTemplate.spec.containers[engine].command"),
    "arguments": (_engine(args=["x"]), "podTemplate.spec.containers[engine].args"),
    "hook": (_engine(lifecycle={}), "podTemplate.spec.containers[engine].lifecycle"),
    "probe": (_engine(readinessProbe=None), "podTemplate.spec.containers[engine].readinessProbe"),
    "our mount": (_engine(volumeMounts=[{"name": "x", "mountPath": "/dev/shm"}]), "volumeMounts[/dev/shm]"),
    "our variable": (_engine(env=[{"name": "HF_HOME", "value": "x"}]), "env[HF_HOME]"),
    "our prefix": (_engine(env=[{"name": "KVROUTING_X", "value": "x"}]), "env[KVROUTING_X]"),
    "no variables": (_engine(env=None), "containers[engine].env"),
    "sidecar": (
        {"spec": {"initContainers": [{"name": "sidecar", "startupProbe": {}}]}},
        "podTemplate.spec.initContainers[sidecar].startupProbe",
    ),
    "sidecar twice": ({"spec": {"containers": [{"name": "sidecar"}]}}, "podTemplate.spec.containers[sidecar]"),
    "our volume": ({"spec": {"volumes": [{"name": "keys", "emptyDir": {}}]}}, "podTemplate.spec.volumes[keys]"),
    "no containers": ({"spec": {"containers": None}}, "cannot be removed"),
    "no such part": ({"status": {}}, "podTemplate.status"),
    "no map": ({"spec": 3}, "podTemplate.spec: must be a map"),
    "container without a name": ({"spec": {"containers": [{"image": "x"}]}}, "each entry needs name"),
    "labels as a list": ({"metadata": {"labels": ["a"]}}, "podTemplate.metadata.labels: must be a map"),
}


@pytest.mark.parametrize("name", BREAKS)
def test_what_would_break_the_pool_is_refused_by_name(name: str) -> None:
    override, words = BREAKS[name]
    with pytest.raises(InvalidSpecError) as caught:
        worker_pod_of(spec_of(podTemplate=override))
    assert words in str(caught.value)


def test_every_reason_is_named_at_once() -> None:
    with pytest.raises(InvalidSpecError) as caught:
        worker_pod_of(spec_of(podTemplate={"spec": {"hostNetwork": True, "restartPolicy": "Never"}}))
    assert "hostNetwork" in str(caught.value)
    assert "restartPolicy" in str(caught.value)


def test_a_router_may_choose_its_nodes_in_its_template() -> None:
    pod = router_pod_of(spec_of(router={"podTemplate": {"spec": {"nodeSelector": {"role": "edge"}}}}))
    assert pod["spec"]["nodeSelector"] == {"role": "edge"}


PLAIN = st.recursive(
    st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=6,
)
MAPS = st.dictionaries(st.sampled_from("abc"), PLAIN, max_size=3)


@given(base=MAPS)
def test_merging_nothing_or_itself_changes_nothing(base: dict[str, Any]) -> None:
    assert merged(base, {}) == base
    assert merged(base, base) == base


@given(base=MAPS, patch=MAPS)
def test_merging_twice_is_merging_once(base: dict[str, Any], patch: dict[str, Any]) -> None:
    try:
        once = merged(base, patch)
    except MergeError:
        return
    assert merged(once, patch) == once
    assert set(once) == set(base) | set(patch)


def test_null_removes_and_named_lists_keep_their_order() -> None:
    base = {"env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}], "x": 1}
    patch = {"env": [{"name": "C", "value": "3"}, {"name": "A", "value": "9"}], "x": None}
    assert merged(base, patch) == {
        "env": [{"name": "A", "value": "9"}, {"name": "B", "value": "2"}, {"name": "C", "value": "3"}]
    }
