"""One pool, as the builders see it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from kvrouting_operator.crd import API_VERSION, KIND
from kvrouting_operator.spec import PoolSpec

Object = dict[str, Any]


class InvalidSpecError(ValueError):
    """A spec that no pool can be made of; the message names the field."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolKey:
    """Which pool."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolIdentity:
    """Which pool, and which incarnation of it."""

    key: PoolKey
    uid: str
    generation: int

    @property
    def name(self) -> str:
        """The pool's name."""
        return self.key.name

    @property
    def namespace(self) -> str:
        """Its namespace."""
        return self.key.namespace

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> PoolIdentity:
        """From the object of the API."""
        metadata = raw["metadata"]
        key = PoolKey(namespace=metadata["namespace"], name=metadata["name"])
        return cls(key=key, uid=metadata["uid"], generation=int(metadata.get("generation", 0)))

    def owner_reference(self) -> Object:
        """Makes the garbage collector delete an object with the pool. It does not block: that takes a right of
        its own.
        """
        return {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "name": self.name,
            "uid": self.uid,
            "controller": True,
            "blockOwnerDeletion": False,
        }

    def owns(self, live: Mapping[str, Any]) -> bool:
        """Whether this incarnation of the pool controls the object."""
        owners = live["metadata"].get("ownerReferences", [])
        return any(owner.get("controller") and owner["uid"] == self.uid for owner in owners)


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolKeys:
    """Secrets of the pool. hash_key: hex, prompts become hashes under it; join_token: a sidecar proves that it
    belongs to the pool; drain_token: whoever asks a sidecar to drain proves that it may.
    """

    hash_key: str
    join_token: str
    drain_token: str

    def __post_init__(self) -> None:
        if not 32 <= len(self.hash_key) <= 128 or any(c not in "0123456789abcdef" for c in self.hash_key):
            raise ValueError(f"the hash key must be 32 to 128 hex digits, got {len(self.hash_key)} characters")
        if not self.join_token or not self.drain_token:
            raise ValueError("the join and the drain token must not be empty")

    def __repr__(self) -> str:
        return f"PoolKeys({self.fingerprint})"

    @property
    def fingerprint(self) -> str:
        """Tells two sets of keys apart and nothing about them: they are random and long."""
        joined = f"{self.hash_key}\n{self.join_token}\n{self.drain_token}"
        return hashlib.sha256(joined.encode()).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True, slots=True)
class Images:
    """What a pool runs where its spec names no image."""

    sglang: str
    simulated: str
    plugin: str
    sidecar: str
    router: str


def parse_spec(raw: object) -> PoolSpec:
    """The typed spec. Raises: InvalidSpecError naming the field and what is wrong with it."""
    try:
        return msgspec.convert(raw, PoolSpec)
    except msgspec.ValidationError as error:
        text = str(error).replace("`$.", "`spec.").replace("`$`", "`spec`")
        raise InvalidSpecError(text if "`spec" in text else f"spec: {text}") from error
