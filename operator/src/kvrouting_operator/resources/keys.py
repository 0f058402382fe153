"""The Secret with the pool's keys. It is made once and immutable: the API server refuses any change of its content."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from typing import Any

from kvrouting_operator.pool import Object, PoolIdentity, PoolKeys
from kvrouting_operator.resources.names import keys_name, pool_labels
from kvrouting_operator.resources.owned import owned

HASH_KEY = "hash-key"
JOIN_TOKEN = "join-token"  # noqa: S105 - the name of a key, not a secret
DRAIN_TOKEN = "drain-token"  # noqa: S105

_BYTES = 32


def new_keys(random_hex: Callable[[int], str]) -> PoolKeys:
    """random_hex: so many random bytes as hex, from a generator fit for secrets."""
    return PoolKeys(hash_key=random_hex(_BYTES), join_token=random_hex(_BYTES), drain_token=random_hex(_BYTES))


def keys_secret(pool: PoolIdentity, keys: PoolKeys) -> Object:
    """The Secret."""
    return owned(
        pool,
        api_version="v1",
        kind="Secret",
        name=keys_name(pool.name),
        labels=pool_labels(pool.name),
        type="Opaque",
        immutable=True,
        stringData={HASH_KEY: keys.hash_key, JOIN_TOKEN: keys.join_token, DRAIN_TOKEN: keys.drain_token},
    )


def read_keys(secret: Mapping[str, Any]) -> PoolKeys:
    """From the live Secret. Raises: ValueError naming a key that is missing or unusable."""
    values = {}
    for name in (HASH_KEY, JOIN_TOKEN, DRAIN_TOKEN):
        if name not in secret.get("data", {}):
            raise ValueError(f"secret {secret['metadata']['name']} has no key {name!r}")
        values[name] = base64.b64decode(secret["data"][name]).decode().strip()
    return PoolKeys(hash_key=values[HASH_KEY], join_token=values[JOIN_TOKEN], drain_token=values[DRAIN_TOKEN])
