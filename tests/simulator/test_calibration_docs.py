"""What docs/calibration.md shows is what the product takes: the file, and the values that bring it to routers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from kvrouting_core.class_file import parse_class
from kvrouting_operator.pool import parse_spec
from tests.operator.pools import container, router_pod_of, worker_pod_of

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = (ROOT / "docs/calibration.md").read_text()
VALUES = ROOT / "helm/kvrouting/ci/measured-class-values.yaml"
CLASS_FILE = "/etc/kvrouting/classes/a10g.json"


def block(language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", DOCUMENT, re.DOTALL)
    assert found is not None
    return found.group(1)


def test_the_file_in_the_document_is_taken() -> None:
    assert parse_class(block("json")).name == "a10g"


@pytest.mark.parametrize("source", ["values", "document"])
def test_a_pools_values_bring_the_file_to_its_routers_and_its_name_to_the_sidecars(source: str) -> None:
    values = yaml.safe_load(VALUES.read_text())["pools"]["a10g"]["spec"]
    if source == "document":
        values = {"model": values["model"], **yaml.safe_load(block("yaml"))}
    spec = parse_spec(values)
    pod = router_pod_of(spec)
    router = container(pod, "router")
    assert f"--class-file={CLASS_FILE}" in router["args"]
    (mounted,) = [mount for mount in router["volumeMounts"] if CLASS_FILE.startswith(mount["mountPath"] + "/")]
    (volume,) = [each for each in pod["spec"]["volumes"] if each["name"] == mounted["name"]]
    assert volume["configMap"]["name"] == "a10g"
    sidecar = container(worker_pod_of(spec), "sidecar")
    assert "--gpu-class=a10g" in sidecar["args"]
