"""The typed definition: what is taken, what is refused and how, and that it agrees with what it configures."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import click
import msgspec
import pytest

from kvrouting_core.eviction import DEFAULT_POLICY, POLICIES
from kvrouting_core.routing.registry import POLICY_NAMES
from kvrouting_core.service_time import WORKER_CLASSES
from kvrouting_operator.crd import custom_resource_definition, pool_schema
from kvrouting_operator.pool import InvalidSpecError, parse_spec
from kvrouting_operator.spec.engine import SIMULATED_FLAGS, EngineSpec, EvictionName
from kvrouting_operator.spec.part import without_absent, without_defaults
from kvrouting_operator.spec.router import ROUTER_FLAGS, PolicyName
from kvrouting_router.command import router
from kvrouting_simulator.engine_process.command import engine
from tests.operator.pools import SIMULATED, SMALLEST, raw_spec, spec_of
from tests.operator.spec_table import ACCEPTED, REFUSED


@pytest.mark.parametrize("name", ACCEPTED)
def test_spec_is_taken(name: str) -> None:
    parse_spec(ACCEPTED[name])


@pytest.mark.parametrize("name", REFUSED)
def test_spec_is_refused_and_the_message_names_the_place(name: str) -> None:
    raw, words = REFUSED[name]
    with pytest.raises(InvalidSpecError) as caught:
        parse_spec(raw)
    assert words in str(caught.value)


def test_defaults_are_those_that_the_schema_writes() -> None:
    """An older stored object without a field and one that the API server completed are the same pool."""
    schema = pool_schema()["properties"]["spec"]
    assert parse_spec(_completed(raw_spec(), schema)) == parse_spec(SMALLEST)


def _completed(value: Any, schema: dict[str, Any]) -> Any:
    """As the API server writes defaults."""
    if not isinstance(value, dict) or "properties" not in schema:
        return value
    for name, child in schema["properties"].items():
        if name not in value and "default" in child:
            value[name] = json.loads(json.dumps(child["default"]))
        if name in value:
            value[name] = _completed(value[name], child)
    return value


def test_what_holds_its_default_does_not_count() -> None:
    assert without_defaults(spec_of()) == SMALLEST
    assert without_defaults(spec_of(replicas=1, drain={"timeoutSeconds": 300})) == SMALLEST
    assert without_defaults(spec_of(replicas=2)) == {**SMALLEST, "replicas": 2}


def test_a_spec_survives_being_written_and_read() -> None:
    for raw in ACCEPTED.values():
        spec = parse_spec(raw)
        assert parse_spec(without_absent(msgspec.to_builtins(spec))) == spec
        assert parse_spec(without_defaults(spec)) == spec


def _fields(schema: dict[str, Any], path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, schema
    for name, child in schema.get("properties", {}).items():
        yield from _fields(child, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            yield from _fields(schema[key], f"{path}[]")


def test_every_field_is_documented_typed_and_closed() -> None:
    schema = pool_schema()
    for part in ("spec", "status"):
        for path, field in _fields(schema["properties"][part], part):
            if not path.endswith("[]"):
                assert field.get("description"), path
            assert "type" in field or field.get("x-kubernetes-int-or-string"), path
            is_open = field.get("x-kubernetes-preserve-unknown-fields", False)
            assert is_open == path.endswith("podTemplate"), path


def test_the_crd_is_small_enough_for_helm() -> None:
    assert len(json.dumps(custom_resource_definition())) <= 100_000


def test_names_are_those_of_the_processes() -> None:
    assert set(get_args(PolicyName)) == set(POLICY_NAMES)
    assert set(get_args(EvictionName)) == set(POLICIES)
    assert spec_of().engine.eviction.policy == DEFAULT_POLICY


def _options(command: click.Command) -> set[str]:
    names = set()
    for parameter in command.params:
        names |= {*parameter.opts, *parameter.secondary_opts}
    return names


def test_refused_flags_exist() -> None:
    assert set(ROUTER_FLAGS) <= _options(router)
    assert set(SIMULATED_FLAGS) <= _options(engine)


def test_priors_in_the_description_are_those_of_the_router() -> None:
    prior = pool_schema()["properties"]["spec"]["properties"]["gpu"]["properties"]["prior"]["description"]
    for name in WORKER_CLASSES:
        if "paper" not in name:
            assert name in prior


def test_tensor_parallelism_fills_the_gpus() -> None:
    assert spec_of(gpu={"count": 4}).tensor_parallel == 4
    assert spec_of(gpu={"count": 4}, engine={"dataParallel": 2}).tensor_parallel == 2
    assert spec_of(gpu={"count": 4}, engine={"dataParallel": 2, "tensorParallel": 1}).tensor_parallel == 1
    assert spec_of(SIMULATED).tensor_parallel == 1


def test_class_brings_its_nodes_unless_others_are_named() -> None:
    assert spec_of().gpu.selected_nodes == {"nvidia.com/gpu.product": "NVIDIA-L40"}
    assert spec_of(gpu={"class": "H200"}).gpu.selected_nodes == {"nvidia.com/gpu.product": "NVIDIA-H200"}
    assert spec_of(gpu={"nodeSelector": {"rack": "7"}}).gpu.selected_nodes == {"rack": "7"}
    assert spec_of(gpu={"nodeSelector": {}, "tolerations": []}).gpu.selected_nodes == {}
    assert spec_of(SIMULATED).gpu.selected_nodes == {}
    assert spec_of(SIMULATED).gpu.tolerated == ()


def test_python_agrees_with_the_schema_about_refused_engine_flags() -> None:
    rules = json.dumps(pool_schema()["properties"]["spec"]["properties"]["engine"]["x-kubernetes-validations"])
    for flag in SIMULATED_FLAGS:
        assert f"'{flag}'" in rules
    assert EngineSpec(args=("--context-length=4096",)).args == ("--context-length=4096",)


def test_a_spec_that_is_no_map_is_refused() -> None:
    with pytest.raises(InvalidSpecError, match="spec"):
        parse_spec([raw_spec()])


def test_chart_and_documents_hold_what_is_generated() -> None:
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "tools/generate_crd.py", "--check"], cwd=root, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_a_stale_file_is_named(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    (tmp_path / "tools").mkdir()
    shutil.copy(root / "tools" / "generate_crd.py", tmp_path / "tools")
    script = [sys.executable, "tools/generate_crd.py"]
    subprocess.run(script, cwd=tmp_path, check=True)
    assert subprocess.run([*script, "--check"], cwd=tmp_path, check=False).returncode == 0
    (tmp_path / "docs" / "crd.md").write_text("old")
    done = subprocess.run([*script, "--check"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert "docs/crd.md" in done.stderr
