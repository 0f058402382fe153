"""Small pieces of pods: probes, security, volumes, environment."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from kvrouting_operator.pool import Object
from kvrouting_operator.spec.part import without_absent
from kvrouting_operator.spec.references import EnvVar, SecretKey
from kvrouting_operator.spec.workload import PullPolicy

KEYS_VOLUME = "keys"
KEYS_PATH = "/etc/kvrouting/keys"
TLS_VOLUME = "tls"
TLS_PATH = "/etc/kvrouting/tls"
MODEL_VOLUME = "models"
MODEL_PATH = "/models"
TOKENIZER_VOLUME = "tokenizer"
TOKENIZER_PATH = "/tokenizer"

# Readable by whatever user an image has; the volume is mounted into our containers alone.
_SECRET_MODE = 0o444


def http_probe(path: str, port: int, *, period_s: int, timeout_s: int, failures: int) -> Object:
    """A probe that asks a page. failures: in a row, before it counts."""
    return {
        "httpGet": {"path": path, "port": port, "scheme": "HTTP"},
        "periodSeconds": period_s,
        "timeoutSeconds": timeout_s,
        "failureThreshold": failures,
    }


def restricted_security() -> Object:
    """What Pod Security `restricted` asks of a container, and a read-only root file system."""
    return {**unprivileged_security(), "runAsNonRoot": True, "readOnlyRootFilesystem": True}


def unprivileged_security() -> Object:
    """As far as an image goes that runs as root and writes to its own file system."""
    return {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def pod_security() -> Object:
    """Of every pod."""
    return {"seccompProfile": {"type": "RuntimeDefault"}}


def image(name: str, policy: PullPolicy | None) -> Object:
    """Image and pull policy; without a policy the cluster's own."""
    return {"image": name, "imagePullPolicy": policy} if policy else {"image": name}


def mount(volume: str, path: str, *, read_only: bool = True) -> Object:
    """A volume mount."""
    return {"name": volume, "mountPath": path, **({"readOnly": True} if read_only else {})}


def secret_volume(volume: str, secret: str, keys: list[str]) -> Object:
    """Some keys of a Secret as files."""
    items = [{"key": key, "path": key} for key in keys]
    return {"name": volume, "secret": {"secretName": secret, "items": items, "defaultMode": _SECRET_MODE}}


def claim_volume(volume: str, claim: str, *, read_only: bool) -> Object:
    """A PersistentVolumeClaim."""
    source: Object = {"claimName": claim, **({"readOnly": True} if read_only else {})}
    return {"name": volume, "persistentVolumeClaim": source}


def empty_volume(volume: str, **options: object) -> Object:
    """A volume that ends with the pod."""
    return {"name": volume, "emptyDir": options}


def plain_env(values: Mapping[str, str]) -> list[Object]:
    """Fixed values, in order."""
    return [{"name": name, "value": value} for name, value in values.items()]


def field_env(name: str, path: str) -> Object:
    """A field of the pod."""
    return {"name": name, "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": path}}}


def secret_env(name: str, key: SecretKey) -> Object:
    """A key of a Secret."""
    return {"name": name, "valueFrom": {"secretKeyRef": {"name": key.name, "key": key.key}}}


def spec_env(variables: tuple[EnvVar, ...]) -> list[Object]:
    """Variables as the spec has them."""
    return [_plain(variable) for variable in variables]


def _plain(variable: EnvVar) -> Object:
    plain = without_absent(msgspec.to_builtins(variable))
    assert isinstance(plain, dict)  # noqa: S101
    return plain
