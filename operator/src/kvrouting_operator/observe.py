"""Reads everything that a pool has in the cluster. I/O through the Cluster protocol only."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable
from typing import Any

from kvrouting_operator.cluster import AlreadyExistsError, Cluster
from kvrouting_operator.observed import Observed, Problem, is_leaving
from kvrouting_operator.pool import Object, PoolIdentity, PoolKeys
from kvrouting_operator.resources.keys import keys_secret, new_keys, read_keys
from kvrouting_operator.resources.names import (
    COMPONENT_LABEL,
    POOL_LABEL,
    ROUTER,
    ROUTER_PORT,
    WORKER,
    keys_name,
)
from kvrouting_operator.router_report import PoolReport, ReportFetcher, RouterAddress
from kvrouting_operator.spec import PoolSpec
from kvrouting_operator.spec.references import SecretKey

OWNED_KINDS = ("Deployment", "Service", "ServiceAccount", "NetworkPolicy", "PodDisruptionBudget")
# Native sidecars are on by default from this version.
_NATIVE_SIDECARS = (1, 29)


class Observer:
    """Observes pools of one cluster. random_hex: so many random bytes as hex, fit for secrets."""

    def __init__(self, *, cluster: Cluster, fetch: ReportFetcher, random_hex: Callable[[int], str]) -> None:
        self._cluster = cluster
        self._fetch = fetch
        self._random_hex = random_hex
        self._version: tuple[int, int] | None = None

    def observe(self, raw: Object, spec: PoolSpec | None) -> Observed:
        """raw: the pool's object. spec: None if it is invalid. Raises: ClusterError."""
        identity = PoolIdentity.of(raw)
        listed = {kind: self._labelled(kind, identity) for kind in (*OWNED_KINDS, "Pod")}
        pods = listed.pop("Pod")
        owned = {(k, o["metadata"]["name"]): o for k, objects in listed.items() for o in objects if identity.owns(o)}
        routers = tuple(_component(pods, ROUTER))
        keys, problems = self._keys(identity)
        report = PoolReport()
        if spec is not None:
            report, more = self._report(identity, spec, routers)
            problems += more
        return Observed(
            identity=identity,
            raw=raw,
            keys=keys,
            native_sidecar=self._native_sidecar(),
            owned=owned,
            worker_pods=tuple(_component(pods, WORKER)),
            router_pods=routers,
            report=report,
            problems=problems,
        )

    def _labelled(self, kind: str, pool: PoolIdentity) -> list[Object]:
        found = self._cluster.find(kind, pool.namespace, selector=f"{POOL_LABEL}={pool.name}")
        return sorted(found, key=lambda o: str(o["metadata"]["name"]))

    def _keys(self, pool: PoolIdentity) -> tuple[PoolKeys | None, tuple[Problem, ...]]:
        """The pool's keys, made if there are none."""
        name = keys_name(pool.name)
        live = self._cluster.get("Secret", pool.namespace, name)
        if live is None:
            try:
                live = self._cluster.create(keys_secret(pool, new_keys(self._random_hex)))
            except AlreadyExistsError:
                live = self._cluster.get("Secret", pool.namespace, name)
        if live is None or not pool.owns(live):
            return None, (Problem(reason="NameTaken", message=f"Secret {name} exists and is not this pool's"),)
        try:
            return read_keys(live), ()
        except ValueError as error:
            return None, (Problem(reason="BadKeys", message=f"{error}: delete it, and the operator makes new keys"),)

    def _report(
        self, pool: PoolIdentity, spec: PoolSpec, routers: Iterable[Object]
    ) -> tuple[PoolReport, tuple[Problem, ...]]:
        api_key: str | None = None
        problems: tuple[Problem, ...] = ()
        if spec.router.api_keys_secret is not None:
            api_key, problems = self._api_key(pool, spec.router.api_keys_secret)
        addresses = [
            RouterAddress(pod=pod["metadata"]["name"], url=_url(pod["status"]["podIP"]), api_key=api_key)
            for pod in routers
            if not is_leaving(pod) and pod.get("status", {}).get("podIP")
        ]
        return self._fetch(addresses, block_size_tokens=spec.sidecar.block_size), problems

    def _api_key(self, pool: PoolIdentity, source: SecretKey) -> tuple[str | None, tuple[Problem, ...]]:
        """The first of the clients' keys: the routers' page of workers asks for one."""
        secret = self._cluster.get("Secret", pool.namespace, source.name)
        held = (secret or {}).get("data", {}).get(source.key)
        keys = base64.b64decode(held).decode().split() if held else []
        if not keys:
            text = f"router.apiKeysSecret: Secret {source.name} has no key {source.key!r} with API keys in it"
            return None, (Problem(reason="SecretMissing", message=text),)
        return keys[0], ()

    def _native_sidecar(self) -> bool:
        if self._version is None:
            self._version = self._cluster.version()
        return self._version >= _NATIVE_SIDECARS


def _component(pods: Iterable[Object], component: str) -> list[Object]:
    return [pod for pod in pods if pod["metadata"].get("labels", {}).get(COMPONENT_LABEL) == component]


def _url(address: Any) -> str:
    host = f"[{address}]" if ":" in str(address) else str(address)
    return f"http://{host}:{ROUTER_PORT}"
