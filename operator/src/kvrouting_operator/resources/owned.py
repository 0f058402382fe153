"""The frame of every object that a pool owns."""

from __future__ import annotations

from collections.abc import Mapping

from kvrouting_operator.pool import Object, PoolIdentity


def owned(
    pool: PoolIdentity,
    *,
    api_version: str,
    kind: str,
    name: str,
    labels: Mapping[str, str],
    annotations: Mapping[str, str] | None = None,
    **content: object,
) -> Object:
    """The object with its owner reference."""
    metadata: Object = {
        "name": name,
        "namespace": pool.namespace,
        "labels": dict(labels),
        "ownerReferences": [pool.owner_reference()],
    }
    if annotations:
        metadata["annotations"] = dict(annotations)
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata, **content}
