"""The reference page of KVRoutingPool, made from the schema."""

from __future__ import annotations

import json
from collections.abc import Iterator

from kvrouting_operator.crd import API_VERSION, KIND, POOL_NAME_RULE, pool_schema
from kvrouting_operator.structural_schema import Schema

_HEAD = f"""# {KIND}

`{API_VERSION}`, namespaced, short name `kvp`. Generated from the operator's types by `tools/generate_crd.py`.

The smallest pool:

```yaml
apiVersion: {API_VERSION}
kind: {KIND}
metadata:
  name: llama
spec:
  model:
    name: meta-llama/Llama-3.1-8B-Instruct
  gpu:
    class: L40
```

`kubectl explain kvp.spec` shows the same on a cluster. `kubectl scale kvp/llama --replicas=3` changes the number of
workers.
"""


def reference_page() -> str:
    """Markdown: the rules, then a table of the fields for spec and status."""
    schema = pool_schema()
    lines = [_HEAD, "## Rules", ""]
    lines += [f"- {rule['message']}." for rule in [POOL_NAME_RULE, *_rules(schema["properties"]["spec"])]]
    for part in ("spec", "status"):
        lines += ["", f"## {part}", "", "| field | type | default | what |", "|---|---|---|---|"]
        lines += list(_rows(part, schema["properties"][part]))
    return "\n".join(lines) + "\n"


def _rules(schema: Schema) -> Iterator[Schema]:
    seen = set()
    for rule in schema.get("x-kubernetes-validations", []):
        if rule["message"] not in seen:
            seen.add(rule["message"])
            yield rule
    for child in schema.get("properties", {}).values():
        yield from _rules(child)
    if "items" in schema:
        yield from _rules(schema["items"])


def _rows(path: str, schema: Schema) -> Iterator[str]:
    required = schema.get("required", [])
    for name, child in schema["properties"].items():
        default = f"`{json.dumps(child['default'])}`" if "default" in child else ""
        if "properties" in child or default in ("`{}`", "`[]`"):
            default = ""
        if name in required:
            default = "required"
        text = child["description"].replace("|", "\\|")
        yield f"| `{path}.{name}` | {_type(child)} | {default} | {text} |"
        inner = child.get("items", child)
        if "properties" in inner:
            yield from _rows(f"{path}.{name}" + ("[]" if "items" in child else ""), inner)


def _type(schema: Schema) -> str:
    if schema.get("x-kubernetes-int-or-string"):
        return "number or text"
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if schema["type"] == "array":
        return f"list of {_type(schema['items'])}"
    if "additionalProperties" in schema:
        return f"map of {_type(schema['additionalProperties'])}"
    return str(schema["type"]) + _range(schema)


def _range(schema: Schema) -> str:
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is None and high is None:
        return ""
    if high is None:
        return f" ≥ {low}"
    return f" {low}…{high}"
