"""Writes the chart's values.schema.json and README.md from values.yaml and the operator's types; --check compares."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from kvrouting_operator.crd import custom_resource_definition

ROOT = Path(__file__).resolve().parent.parent
CHART = ROOT / "helm/kvrouting"
Schema = dict[str, Any]

_KEY = re.compile(r"^(?P<indent> *)(?P<key>[A-Za-z0-9_.-]+):")
_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
_MAP_OF_TEXT = {"type": "object", "additionalProperties": {"type": "string"}}


@dataclass(frozen=True, kw_only=True, slots=True)
class Value:
    """One documented key of values.yaml. demands: the lines of its comment that begin with @, without it."""

    path: tuple[str, ...]
    description: str
    demands: tuple[str, ...]

    def demand(self, name: str) -> str | None:
        """What follows the name of a demand; None without one."""
        for demand in self.demands:
            word, _, rest = demand.partition(" ")
            if word == name:
                return rest
        return None

    @property
    def is_whole(self) -> bool:
        """Whether what lies below it is not documented key by key."""
        return any(self.demand(name) is not None for name in ("map", "free", "pools", "items"))


def documented(text: str) -> Iterator[Value]:
    """The keys of values.yaml that have a comment above them, and those that hold such keys."""
    path: list[str] = []
    comment: list[str] = []
    for line in text.splitlines():
        stripped = line.strip()
        if stripped.startswith("#"):
            comment.append(stripped.lstrip("# "))
        elif not stripped:
            comment = []
        else:
            found = _KEY.match(line)
            if found is not None:
                path = [*path[: len(found["indent"]) // 2], found["key"]]
                words = " ".join(c for c in comment if not c.startswith("@"))
                demands = tuple(c[1:] for c in comment if c.startswith("@"))
                yield Value(path=tuple(path), description=words, demands=demands)
            comment = []


def closed(crd_schema: Mapping[str, Any]) -> Schema:
    """A CRD's schema for a values file: unknown fields refused; required fields may come from a preset, and what
    only an API server can judge is left to it.
    """
    kept = ("type", "description", "enum", "minimum", "maximum", "minLength", "maxLength", "pattern", "minItems")
    schema: Schema = {key: crd_schema[key] for key in kept if key in crd_schema}
    if crd_schema.get("x-kubernetes-int-or-string"):
        schema["type"] = ["integer", "string"]
        schema.pop("pattern", None)
    if "properties" in crd_schema:
        schema["properties"] = {name: closed(field) for name, field in crd_schema["properties"].items()}
        schema["additionalProperties"] = False
    elif isinstance(crd_schema.get("additionalProperties"), Mapping):
        schema["additionalProperties"] = closed(crd_schema["additionalProperties"])
    if "items" in crd_schema:
        schema["items"] = closed(crd_schema["items"])
    return schema


def _pools() -> Schema:
    crd = custom_resource_definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return {
        "type": "object",
        "propertyNames": {"pattern": "^[A-Za-z]([-A-Za-z0-9]{0,38}[A-Za-z0-9])?$"},
        "additionalProperties": {
            "type": "object",
            "additionalProperties": False,
            "properties": {
                "preset": {"type": "string", "description": "Name in presets whose spec comes first."},
                "labels": {**_MAP_OF_TEXT, "description": "Of the KVRoutingPool."},
                "annotations": {**_MAP_OF_TEXT, "description": "Of the KVRoutingPool."},
                "spec": closed(crd["properties"]["spec"]),
            },
        },
    }


def _schema_of(value: Value, default: object) -> Schema:
    described = {"description": value.description} if value.description else {}
    if value.demand("pools") is not None:
        return {**_pools(), **described}
    if value.demand("map") is not None:
        return {**_MAP_OF_TEXT, **described}
    schema: Schema = {"type": _TYPES[type(default)], **described}
    if (items := value.demand("items")) is not None:
        schema["items"] = {"type": items}
    if (enum := value.demand("enum")) is not None:
        schema["enum"] = enum.split()
    if (minimum := value.demand("minimum")) is not None:
        schema["minimum"] = int(minimum)
    if schema["type"] == "object" and value.demand("free") is None:
        schema |= {"properties": {}, "additionalProperties": False}
    return schema


def tree(values: list[Value], defaults: Mapping[str, Any]) -> Iterator[tuple[Value, Any]]:
    """Each documented key with its default; what lies below one that stands as a whole is left out."""
    whole: list[tuple[str, ...]] = []
    for value in values:
        if any(value.path[: len(path)] == path for path in whole):
            continue
        if value.is_whole:
            whole.append(value.path)
        default: Any = defaults
        for key in value.path:
            default = default[key]
        yield value, default


def values_schema(text: str) -> Schema:
    """Of the whole file."""
    root: Schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "additionalProperties": False,
        "properties": {},
    }
    for value, default in tree(list(documented(text)), yaml.safe_load(text)):
        holder = root
        for key in value.path[:-1]:
            holder = holder["properties"][key]
        holder["properties"][value.path[-1]] = _schema_of(value, default)
    # Helm hands these to every chart.
    root["properties"]["global"] = {"type": "object"}
    return root


def readme(text: str, chart: Mapping[str, Any]) -> str:
    """README.md."""
    rows = []
    for value, default in tree(list(documented(text)), yaml.safe_load(text)):
        if isinstance(default, dict) and default and not value.is_whole:
            continue
        shown = "see values.yaml" if value.path == ("presets",) else f"`{json.dumps(default)}`"
        choice = value.demand("enum")
        words = value.description + (f" One of {', '.join(choice.split())}." if choice else "")
        rows.append(f"| `{'.'.join(value.path)}` | {shown} | {words} |")
    head = (CHART / "README.head.md").read_text()
    return (
        f"# {chart['name']}\n\n<!-- Generated by tools/generate_chart.py from values.yaml and README.head.md. -->\n\n"
        f"{chart['description']}. Version {chart['version']}, Kubernetes {chart['kubeVersion'].removesuffix('-0')}.\n\n"
        f"{head}\n## Values\n\n| key | default | what |\n|---|---|---|\n" + "\n".join(rows) + "\n"
    )


def generated() -> Mapping[Path, str]:
    """File → content."""
    text = (CHART / "values.yaml").read_text()
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    return {
        CHART / "values.schema.json": json.dumps(values_schema(text), indent=1) + "\n",
        CHART / "README.md": readme(text, chart),
    }


def main() -> int:
    """Generates, or checks and returns 1 with the list of stale files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare only; exit 1 if a file is stale")
    if parser.parse_args().check:
        stale = [str(p) for p, text in generated().items() if not p.is_file() or p.read_text() != text]
        if stale:
            print("stale, run `python tools/generate_chart.py`:", *stale, sep="\n  ", file=sys.stderr)
        return int(bool(stale))
    for path, text in generated().items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
