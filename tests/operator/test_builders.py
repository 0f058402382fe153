"""The objects of a pool: pure, complete, apart from those of every other pool, and true to each field of the spec."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouting_operator.crd import pool_schema
from kvrouting_operator.pool import Images, InvalidSpecError, Object, PoolKeys, parse_spec
from kvrouting_operator.rendered_template import canonical
from kvrouting_operator.resources.keys import keys_secret, new_keys, read_keys
from kvrouting_operator.resources.names import COMPONENT_LABEL, POOL_LABEL, keys_name
from kvrouting_operator.structural_schema import Schema
from kvrouting_router.command import router
from kvrouting_sidecar.command import sidecar
from kvrouting_simulator.engine_process.command import engine
from tests.operator.pools import (
    IMAGES,
    SIMULATED,
    container,
    identity_of,
    objects_of,
    observed_of,
    raw_spec,
    router_pod_of,
    spec_of,
    worker_pod_of,
)
from tests.operator.spec_table import ACCEPTED

POOL_NAMES = st.from_regex(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?", fullmatch=True)


@pytest.mark.parametrize("name", ACCEPTED)
def test_same_input_gives_the_same_bytes(name: str) -> None:
    spec = parse_spec(ACCEPTED[name])
    shuffled = parse_spec(dict(reversed(ACCEPTED[name].items())))
    once, again = objects_of(spec), objects_of(shuffled)
    assert [canonical(o) for o in once.values()] == [canonical(o) for o in again.values()]


def test_builders_change_nothing_that_they_are_given() -> None:
    spec = spec_of(podTemplate={"metadata": {"labels": {"team": "a"}}})
    before = copy.deepcopy(spec.pod_template)
    objects_of(spec)
    assert spec.pod_template == before


@given(first=POOL_NAMES, second=POOL_NAMES)
def test_two_pools_never_share_a_name_or_a_label(first: str, second: str) -> None:
    if first == second:
        return
    one, other = (objects_of(spec_of(), observed_of(name)) for name in (first, second))
    assert not set(one) & set(other)
    assert keys_name(first) != keys_name(second)
    names = {(kind, keys_name(first)) for kind, _ in one}
    assert not names & set(other)
    for body in one.values():
        assert body["metadata"]["labels"][POOL_LABEL] == first
        for selector in _selectors(body):
            assert selector[POOL_LABEL] == first


def _selectors(value: Any) -> Iterator[dict[str, str]]:
    """Everything by which an object selects pods."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if key == "matchLabels" or (key == "selector" and "matchLabels" not in inner):
                yield inner
            else:
                yield from _selectors(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _selectors(inner)


def test_every_object_is_owned_and_nothing_blocks_its_deletion() -> None:
    for body in objects_of(spec_of()).values():
        (owner,) = body["metadata"]["ownerReferences"]
        assert (owner["uid"], owner["controller"], owner["blockOwnerDeletion"]) == ("uid-default-llama", True, False)
        assert "finalizers" not in body["metadata"]


def test_every_port_names_its_protocol() -> None:
    """Server-side apply merges ports by it; older API servers fail without."""
    for body in objects_of(spec_of()).values():
        for ports in _lists(body, "ports"):
            assert all("protocol" in port for port in ports)


def _lists(value: Any, key: str) -> Iterator[list[Any]]:
    if isinstance(value, dict):
        for name, inner in value.items():
            if name == key and isinstance(inner, list):
                yield inner
            yield from _lists(inner, key)
    elif isinstance(value, list):
        for inner in value:
            yield from _lists(inner, key)


def _leaves(schema: Schema, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for name, child in schema["properties"].items():
        if "properties" in child:
            yield from _leaves(child, (*path, name))
        else:
            yield (*path, name)


# Field → another value, and what else the spec must hold for it. A field that is not named here fails the test.
CHANGES: dict[str, tuple[Any, dict[str, Any]]] = {
    "model.name": ("other", {}),
    "model.revision": ("abc", {}),
    "model.servedName": ("served", {}),
    "model.source.hub.tokenSecret.name": (
        "s2",
        {"model": {"source": {"hub": {"tokenSecret": {"name": "s", "key": "k"}}}}},
    ),
    "model.source.hub.tokenSecret.key": (
        "k2",
        {"model": {"source": {"hub": {"tokenSecret": {"name": "s", "key": "k"}}}}},
    ),
    "model.source.volume.path": ("/b", {"model": {"source": {"volume": {"path": "/a"}}}}),
    "model.source.volume.claimName": ("c", {"model": {"source": {"volume": {"path": "/a"}}}}),
    "model.tokenizer.kind": ("none", {}),
    "model.tokenizer.name": ("t2", {"model": {"tokenizer": {"kind": "hub", "name": "t"}}}),
    "model.tokenizer.revision": ("r", {"model": {"tokenizer": {"kind": "hub", "name": "t"}}}),
    "model.tokenizer.path": ("/b", {"model": {"tokenizer": {"kind": "volume", "path": "/a"}}}),
    "model.tokenizer.claimName": ("c", {"model": {"tokenizer": {"kind": "volume", "path": "/a"}}}),
    "gpu.class": ("H200", {}),
    "gpu.count": (2, {}),
    "gpu.prior": ("H200x2-llama-70b", {}),
    "gpu.nodeSelector": ({"rack": "7"}, {}),
    "gpu.tolerations": ([], {}),
    "gpu.runtimeClassName": ("nvidia", {}),
    "gpu.resourceName": ("amd.com/gpu", {}),
    "replicas": (3, {}),
    "engine.runtime": ("simulated", {}),
    "engine.image": ("i", {}),
    "engine.imagePullPolicy": ("Always", {}),
    "engine.plugin.source": ("image", {}),
    "engine.plugin.image": ("p", {}),
    "engine.plugin.imagePullPolicy": ("Always", {}),
    "engine.args": (["--x"], {}),
    "engine.tensorParallel": (1, {"gpu": {"count": 2}}),
    "engine.dataParallel": (2, {"gpu": {"count": 2}}),
    "engine.pageSize": (16, {}),
    "engine.memoryFraction": (0.5, {}),
    "engine.eviction.policy": ("lru", {}),
    "engine.eviction.seed": (7, {}),
    "engine.resources.requests": ({"cpu": "1"}, {}),
    "engine.resources.limits": ({"cpu": "1"}, {}),
    "engine.env": ([{"name": "A", "value": "1"}], {}),
    "engine.sharedMemorySize": ("2Gi", {}),
    "engine.cacheVolume.claimName": ("c", {}),
    "engine.cacheVolume.size": ("9Gi", {}),
    "engine.cacheVolume.mountPath": ("/elsewhere", {}),
    "engine.startupSeconds": (60, {}),
    "sidecar.image": ("i", {}),
    "sidecar.imagePullPolicy": ("Always", {}),
    "sidecar.blockSize": (32, {}),
    "sidecar.resources.requests": ({"cpu": "1"}, {}),
    "sidecar.resources.limits": ({"cpu": "1"}, {}),
    "router.replicas": (2, {}),
    "router.image": ("i", {}),
    "router.imagePullPolicy": ("Always", {}),
    "router.policy.name": ("random", {}),
    "router.policy.parameters": ({"a": "1"}, {}),
    "router.args": (["--max-waiting=1"], {}),
    "router.service.type": ("NodePort", {}),
    "router.service.port": (8000, {}),
    "router.service.nodePort": (30080, {"router": {"service": {"type": "NodePort"}}}),
    "router.service.annotations": ({"a": "b"}, {}),
    "router.resources.requests": ({"cpu": "1"}, {}),
    "router.resources.limits": ({"cpu": "1"}, {}),
    "router.apiKeysSecret.name": ("s2", {"router": {"apiKeysSecret": {"name": "s", "key": "k"}}}),
    "router.apiKeysSecret.key": ("k2", {"router": {"apiKeysSecret": {"name": "s", "key": "k"}}}),
    "router.tlsSecretName": ("tls", {}),
    "router.podTemplate": ({"spec": {"priorityClassName": "high"}}, {}),
    "tracing.endpoint": ("http://b:4317", {"tracing": {"endpoint": "http://a:4317"}}),
    "tracing.sampling": (0.5, {"tracing": {"endpoint": "http://a:4317"}}),
    "tracing.engine": (True, {"tracing": {"endpoint": "http://a:4317"}}),
    "monitoring.namespaces": (["observability"], {}),
    "drain.timeoutSeconds": (10, {}),
    "rollout.maxSurge": (1, {}),
    "rollout.maxUnavailable": (2, {}),
    "podTemplate": ({"spec": {"priorityClassName": "high"}}, {}),
}
# `rollout.trigger` changes what the templates are rendered from, and is tested with them.
TRIGGER = "rollout.trigger"
# Changes that replace no pod, and those that replace pods of one kind only.
NO_PODS = {"replicas", "router.replicas", "router.service.type", "router.service.port", "router.service.nodePort",
           "router.service.annotations", "monitoring.namespaces", "rollout.maxSurge",
           "rollout.maxUnavailable"}  # fmt: skip
ROUTERS_ONLY = {"router.image", "router.imagePullPolicy", "router.policy.name", "router.policy.parameters",
"router.args", "router.resources.requests", "router.resources.limits", "router.apiKeysSecret.name",
                "router.apiKeysSecret.key", "router.podTemplate", "tracing.endpoint", "tracing.sampling"}  # fmt: skip
BOTH = {"model.name", "model.revision", "model.servedName", "model.source.hub.tokenSecret.name",
        "model.source.hub.tokenSecret.key", "model.source.volume.path", "model.source.volume.claimName",
        "sidecar.blockSize", "router.tlsSecretName", "drain.timeoutSeconds"}  # fmt: skip


def test_every_field_of_the_spec_is_in_the_table_of_changes() -> None:
    leaves = {".".join(path) for path in _leaves(pool_schema()["properties"]["spec"], ())}
    assert leaves == {*CHANGES, TRIGGER}


def _nested(field: str, value: Any) -> dict[str, Any]:
    for name in reversed(field.split(".")):
        value = {name: value}
    return dict(value)


def _changed(field: str) -> tuple[dict[tuple[str, str], Object], dict[tuple[str, str], Object]]:
    value, base = CHANGES[field]
    before = raw_spec(**base)
    return objects_of(parse_spec(before)), objects_of(parse_spec(raw_spec(before, **_nested(field, value))))


@pytest.mark.parametrize("field", CHANGES)
def test_every_field_of_the_spec_changes_something(field: str) -> None:
    before, after = _changed(field)
    assert before != after


@pytest.mark.parametrize("field", CHANGES)
def test_a_change_replaces_only_the_pods_that_it_must(field: str) -> None:
    before, after = _changed(field)
    replaced = {
        name
        for (kind, name), body in before.items()
        if kind == "Deployment" and body["spec"]["template"] != after[kind, name]["spec"]["template"]
    }
    if field in NO_PODS:
        assert replaced == set()
    elif field in ROUTERS_ONLY or field.startswith("model.tokenizer"):
        assert replaced == {"llama-router"}
    elif field in BOTH:
        assert replaced == {"llama-router", "llama-worker"}
    else:
        assert replaced == {"llama-worker"}


def test_keys_are_random_hex_and_survive_the_secret() -> None:
    numbers = iter(range(100))
    keys = new_keys(lambda size: f"{next(numbers):02x}" * size)
    secret = keys_secret(identity_of(), keys)
    assert len(bytes.fromhex(keys.hash_key)) == 32
    assert len({keys.hash_key, keys.join_token, keys.drain_token}) == 3
    assert secret["immutable"] is True
    import base64

    stored = {k: base64.b64encode(v.encode()).decode() for k, v in secret["stringData"].items()}
    assert read_keys({**secret, "data": stored}) == keys
    assert keys.hash_key not in repr(keys)


def test_unusable_keys_are_refused() -> None:
    with pytest.raises(ValueError, match="hex digits"):
        PoolKeys(hash_key="short", join_token="j", drain_token="d")
    with pytest.raises(ValueError, match="has no key 'hash-key'"):
        read_keys({"metadata": {"name": "x"}, "data": {}})


def test_the_engine_ends_only_when_its_sidecar_has_drained() -> None:
    pod = worker_pod_of(spec_of(drain={"timeoutSeconds": 100}))
    hook = container(pod, "engine")["lifecycle"]["preStop"]["httpGet"]
    assert (hook["path"], hook["port"]) == ("/drain", 9400)
    assert hook["httpHeaders"] == [{"name": "x-kvrouting-drain-token", "value": "drain"}]
    assert "--drain-timeout=100" in container(pod, "sidecar")["args"]
    assert pod["spec"]["terminationGracePeriodSeconds"] > 100


def test_native_sidecar_never_waits_for_the_engine() -> None:
    pod = worker_pod_of(spec_of())
    native = container(pod, "sidecar")
    assert native in pod["spec"]["initContainers"]
    assert native["restartPolicy"] == "Always"
    assert native["startupProbe"]["httpGet"]["path"] == "/healthz"
    assert native["readinessProbe"]["httpGet"]["path"] == "/readyz"


def test_older_clusters_get_an_ordinary_sidecar_that_drains_as_well() -> None:
    objects = objects_of(spec_of(), observed_of(native_sidecar=False))
    spec = objects["Deployment", "llama-worker"]["spec"]["template"]["spec"]
    ordinary = next(c for c in spec["containers"] if c["name"] == "sidecar")
    assert "restartPolicy" not in ordinary
    assert ordinary["lifecycle"]["preStop"]["httpGet"]["path"] == "/drain"
    assert [c["name"] for c in spec["initContainers"]] == ["plugin"]


def test_startup_budget_covers_the_seconds_of_the_spec() -> None:
    probe = container(worker_pod_of(spec_of(engine={"startupSeconds": 1801})), "engine")["startupProbe"]
    assert 1801 <= probe["periodSeconds"] * probe["failureThreshold"] < 1801 + probe["periodSeconds"]


def test_workers_need_no_spare_gpu_in_a_rollout() -> None:
    strategy = objects_of(spec_of())["Deployment", "llama-worker"]["spec"]["strategy"]
    assert strategy["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}


def _arguments(args: list[str], flag: str) -> str:
    return next(a.split("=", 1)[1] for a in args if a.startswith(f"{flag}="))


def test_sglang_gets_the_flags_of_the_pool() -> None:
    spec = spec_of(gpu={"class": "H200", "count": 4}, engine={"dataParallel": 2, "pageSize": 16, "args": ["--x=1"]})
    args = container(worker_pod_of(spec), "engine")["args"]
    events = json.loads(_arguments(args, "--kv-events-config"))
    assert events["endpoint"].startswith("tcp://127.0.0.1:")
    assert _arguments(args, "--radix-cache-backend") == "rlt"
    assert _arguments(args, "--tp-size") == "2"
    assert _arguments(args, "--dp-size") == "2"
    assert _arguments(args, "--page-size") == "16"
    assert _arguments(args, "--mem-fraction-static") == "0.88"
    assert _arguments(args, "--host") == "0.0.0.0"
    assert {"--enable-metrics", "--enable-cache-report"} <= set(args)
    assert args[-1] == "--x=1"


@pytest.mark.parametrize(("gpu", "page"), [("L40", "1"), ("H200", "16")])
def test_a_class_brings_its_page_size(gpu: str, page: str) -> None:
    args = container(worker_pod_of(spec_of(gpu={"class": gpu})), "engine")["args"]
    assert _arguments(args, "--page-size") == page


def test_rank_ports_never_meet() -> None:
    args = container(worker_pod_of(spec_of(gpu={"count": 16}, engine={"dataParallel": 16})), "engine")["args"]
    events = json.loads(_arguments(args, "--kv-events-config"))
    bases = [events["endpoint"], events["replay_endpoint"], _arguments(args, "--load-publish-endpoint"), "tcp://x:5857"]
    ports = [int(base.rsplit(":", 1)[1]) + rank for base in bases for rank in range(16)]
    assert len(set(ports)) == len(ports)
    assert not {30000, 9400} & set(ports)


def test_the_plug_in_gets_only_settings_that_it_knows() -> None:
    from kvrouting_sglang.settings import EngineSettings

    spec = spec_of(engine={"eviction": {"policy": "lru", "seed": 5}})
    env = {e["name"]: e["value"] for e in container(worker_pod_of(spec), "engine")["env"] if "value" in e}
    settings = EngineSettings.from_environment(env)
    assert (settings.policy, settings.seed, settings.state_endpoint) == ("lru", 5, "tcp://127.0.0.1:5857")
    assert worker_pod_of(spec)["spec"]["enableServiceLinks"] is False


def test_plug_in_is_copied_where_python_finds_it() -> None:
    pod = worker_pod_of(spec_of())
    target = container(pod, "plugin")["command"][-1]
    env = {e["name"]: e.get("value") for e in container(pod, "engine")["env"]}
    assert env["PYTHONPATH"] == target
    assert any(m["mountPath"] == target for m in container(pod, "engine")["volumeMounts"])
    with pytest.raises(StopIteration):
        container(worker_pod_of(spec_of(engine={"plugin": {"source": "image"}})), "plugin")


def _taken(command: click.Command, args: list[str], folder: Path) -> dict[str, Any]:
    """What a command understands of its arguments; files of the pod are there."""
    key = folder / "file"
    key.write_text("ab" * 32)
    local = [a.split("=", 1)[0] + f"={key}" if "=/etc/kvrouting" in a else a for a in args]
    return dict(command.make_context(command.name or "", local).params)


RICH_ROUTER = {
    "apiKeysSecret": {"name": "a", "key": "k"},
    "tlsSecretName": "t",
    "policy": {"name": "lbgr", "parameters": {"x": "1"}},
    "args": ["--max-waiting=7"],
}


@pytest.mark.parametrize("base", ["plain", "rich"])
def test_processes_take_the_arguments_that_they_are_given(base: str, tmp_path: Path) -> None:
    more: dict[str, Any] = {}
    if base == "rich":
        more = {"router": RICH_ROUTER, "tracing": {"endpoint": "http://c:4317", "engine": True}}
    spec = spec_of(SIMULATED, **more)
    worker, route = worker_pod_of(spec), router_pod_of(spec)
    taken = _taken(sidecar, container(worker, "sidecar")["args"], tmp_path)
    assert (taken["pool"], taken["block_size"], taken["require_eviction"]) == ("llama", 64, "rlt-adaptive")
    asked = _taken(router, container(route, "router")["args"], tmp_path)
    assert (asked["pool"], asked["block_size"], asked["model"]) == ("llama", 64, "simulated-llama")
    assert asked["tracing"] is (base == "rich")
    played = _taken(engine, container(worker, "engine")["args"], tmp_path)
    assert (played["eviction"], played["worker_class"], played["state_port"]) == ("rlt-adaptive", "L40", 5857)


def test_only_the_pools_own_pods_reach_engine_sidecar_and_grpc() -> None:
    objects = objects_of(spec_of())
    worker = objects["NetworkPolicy", "llama-worker"]["spec"]
    (rule,) = worker["ingress"]
    assert {port["port"] for port in rule["ports"]} == {30000, 9400}
    assert rule["from"][0]["podSelector"]["matchLabels"] == {POOL_LABEL: "llama", COMPONENT_LABEL: "router"}
    http, grpc = objects["NetworkPolicy", "llama-router"]["spec"]["ingress"]
    assert "from" not in http
    assert [port["port"] for port in grpc["ports"]] == [9090]
    assert grpc["from"][0]["podSelector"]["matchLabels"] == {POOL_LABEL: "llama", COMPONENT_LABEL: "worker"}


def test_prometheus_reaches_the_sidecars_page_and_no_port_that_takes_prompts() -> None:
    objects = objects_of(spec_of(monitoring={"namespaces": ["observability"]}))
    _, rule = objects["NetworkPolicy", "llama-worker"]["spec"]["ingress"]
    assert [port["port"] for port in rule["ports"]] == [9400]
    (source,) = rule["from"]
    assert source == {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "observability"}}}


def test_no_pod_gets_a_token_of_the_api_server() -> None:
    objects = objects_of(spec_of())
    for name in ("llama-worker", "llama-router"):
        assert objects["ServiceAccount", name]["automountServiceAccountToken"] is False
        assert objects["Deployment", name]["spec"]["template"]["spec"]["automountServiceAccountToken"] is False


@pytest.mark.parametrize("base", [SIMULATED, raw_spec()])
def test_containers_keep_to_pod_security_restricted_but_the_sglang_engine(base: dict[str, Any]) -> None:
    spec = parse_spec(base)
    for pod in (worker_pod_of(spec), router_pod_of(spec)):
        assert pod["spec"]["securityContext"]["seccompProfile"]["type"] == "RuntimeDefault"
        for one in [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]:
            security = one["securityContext"]
            assert security["allowPrivilegeEscalation"] is False
            assert security["capabilities"] == {"drop": ["ALL"]}
            if one["name"] != "engine" or spec.engine.runtime == "simulated":
                assert security["runAsNonRoot"] is True
                assert security["readOnlyRootFilesystem"] is True


def test_a_broken_pod_template_is_refused_by_name() -> None:
    with pytest.raises(InvalidSpecError, match=r"router\.podTemplate\.spec\.hostNetwork"):
        objects_of(spec_of(router={"podTemplate": {"spec": {"hostNetwork": True}}}))


def test_images_of_the_spec_go_before_those_of_the_operator() -> None:
    named = spec_of(engine={"image": "mine"}, sidecar={"image": "my-sidecar"}, router={"image": "my-router"})
    assert container(worker_pod_of(named), "engine")["image"] == "mine"
    assert container(worker_pod_of(named), "sidecar")["image"] == "my-sidecar"
    assert container(router_pod_of(named), "router")["image"] == "my-router"
    assert container(worker_pod_of(spec_of()), "engine")["image"] == IMAGES.sglang
    assert container(worker_pod_of(spec_of(SIMULATED)), "engine")["image"] == IMAGES.simulated
    assert isinstance(IMAGES, Images)
