"""References to what a pool uses and does not own: secrets, volumes, environment values."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from kvrouting_operator.spec.part import ObjectName, Part, Rule


class SecretKey(Part, frozen=True, kw_only=True):
    """One key of a Secret in the pool's namespace."""

    name: Annotated[ObjectName, Meta(description="Name of the Secret.")]
    key: Annotated[str, Meta(description="Key in its data.", min_length=1, max_length=253)]


class SecretKeyReference(Part, frozen=True, kw_only=True):
    """A key of a Secret."""

    name: Annotated[ObjectName, Meta(description="Name of the Secret.")]
    key: Annotated[str, Meta(description="Key in its data.", min_length=1, max_length=253)]
    optional: Annotated[bool, Meta(description="Whether the container starts without it.")] = False


class ConfigMapKeyReference(Part, frozen=True, kw_only=True):
    """A key of a ConfigMap."""

    name: Annotated[ObjectName, Meta(description="Name of the ConfigMap.")]
    key: Annotated[str, Meta(description="Key in its data.", min_length=1, max_length=253)]
    optional: Annotated[bool, Meta(description="Whether the container starts without it.")] = False


class FieldReference(Part, frozen=True, kw_only=True):
    """A field of the pod."""

    field_path: Annotated[str, Meta(description="For example status.hostIP.", min_length=1, max_length=253)]


class EnvSource(Part, frozen=True, kw_only=True):
    """Where the value of an environment variable comes from: exactly one of the three."""

    RULES = (
        Rule(
            cel="[has(self.secretKeyRef), has(self.configMapKeyRef), has(self.fieldRef)].filter(x, x).size() == 1",
            message="valueFrom needs exactly one of secretKeyRef, configMapKeyRef and fieldRef",
        ),
    )

    secret_key_ref: Annotated[SecretKeyReference | None, Meta(description="A key of a Secret.")] = None
    config_map_key_ref: Annotated[ConfigMapKeyReference | None, Meta(description="A key of a ConfigMap.")] = None
    field_ref: Annotated[FieldReference | None, Meta(description="A field of the pod.")] = None

    def __post_init__(self) -> None:
        if [self.secret_key_ref, self.config_map_key_ref, self.field_ref].count(None) != 2:
            raise ValueError("valueFrom needs exactly one of secretKeyRef, configMapKeyRef and fieldRef")


class EnvVar(Part, frozen=True, kw_only=True):
    """An environment variable, as in a container."""

    RULES = (
        Rule(cel="!(has(self.value) && has(self.valueFrom))", message="an env entry has value or valueFrom, not both"),
    )

    name: Annotated[str, Meta(description="Name of the variable.", pattern="^[A-Za-z_][A-Za-z0-9_]*$", max_length=128)]
    value: Annotated[Annotated[str, Meta(max_length=8192)] | None, Meta(description="Its value.")] = None
    value_from: Annotated[EnvSource | None, Meta(description="Where its value comes from.")] = None

    def __post_init__(self) -> None:
        if self.value is not None and self.value_from is not None:
            raise ValueError(f"env {self.name} has value or valueFrom, not both")
