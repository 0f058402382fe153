"""What the operator needs of a cluster, and the errors that a cluster answers with. No I/O here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

from kvrouting_operator.crd import API_VERSION, KIND, PLURAL
from kvrouting_operator.pool import Object
from kvrouting_operator.resources.names import FIELD_MANAGER


@dataclass(frozen=True, kw_only=True, slots=True)
class ResourceKind:
    """Where objects of a kind are found. plural: last part of the path."""

    api_version: str
    plural: str
    namespaced: bool = True

    def path(self, namespace: str | None = None, name: str | None = None) -> str:
        """Path of one object, of a namespace's list or (namespace None) of the cluster's list."""
        root = f"/api/{self.api_version}" if "/" not in self.api_version else f"/apis/{self.api_version}"
        if self.namespaced and namespace is not None:
            root += f"/namespaces/{namespace}"
        return f"{root}/{self.plural}" + (f"/{name}" if name else "")


KINDS: Mapping[str, ResourceKind] = MappingProxyType(
    {
        KIND: ResourceKind(api_version=API_VERSION, plural=PLURAL),
        "Deployment": ResourceKind(api_version="apps/v1", plural="deployments"),
        "Pod": ResourceKind(api_version="v1", plural="pods"),
        "Service": ResourceKind(api_version="v1", plural="services"),
        "ServiceAccount": ResourceKind(api_version="v1", plural="serviceaccounts"),
        "Secret": ResourceKind(api_version="v1", plural="secrets"),
        "Event": ResourceKind(api_version="v1", plural="events"),
        "NetworkPolicy": ResourceKind(api_version="networking.k8s.io/v1", plural="networkpolicies"),
        "PodDisruptionBudget": ResourceKind(api_version="policy/v1", plural="poddisruptionbudgets"),
        "CustomResourceDefinition": ResourceKind(
            api_version="apiextensions.k8s.io/v1", plural="customresourcedefinitions", namespaced=False
        ),
    }
)


class ClusterError(Exception):
    """The API server did not do what it was asked."""


class FieldConflictError(ClusterError):
    """Somebody else owns a field; the message names field and manager."""


class AlreadyExistsError(ClusterError):
    """There is an object of this name."""


class NotFoundError(ClusterError):
    """The object to be changed is gone."""


class RejectedError(ClusterError):
    """The API server refuses this object, and will as long as nothing else changes."""


class UnavailableError(ClusterError):
    """No answer, or one that says try again."""


class Cluster(Protocol):
    """Synchronous; every call has a time-out and raises one of the errors above."""

    def get(self, kind: str, namespace: str | None, name: str) -> Object | None:
        """The object; None if there is none."""

    def find(self, kind: str, namespace: str | None, *, selector: str = "") -> list[Object]:
        """The objects that match a label selector; namespace None: of all namespaces."""

    def create(self, body: Object) -> Object:
        """Makes a new object. Raises: AlreadyExistsError."""

    def apply(self, body: Object, *, force: bool = False, manager: str = FIELD_MANAGER) -> Object:
        """Server-side apply under the manager's name. Raises: FieldConflictError unless forced."""

    def apply_status(self, body: Object) -> Object:
        """Server-side apply of the status, which nobody else writes. Raises: NotFoundError."""

    def check_watch(self, kind: str, namespace: str | None, *, selector: str = "") -> None:
        """Returns if objects may be watched now. Raises: RejectedError, NotFoundError; UnavailableError."""

    def version(self) -> tuple[int, int]:
        """Major and minor version of the API server."""


def created_of(body: Mapping[str, Any]) -> str:
    """How an object is called in messages."""
    return f"{body['kind']} {body['metadata']['name']}"
