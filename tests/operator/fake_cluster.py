"""A cluster in memory: server-side apply with field managers at the top level of spec, and errors on demand."""

from __future__ import annotations

import copy
from collections.abc import Iterable

from kvrouting_operator.cluster import (
    AlreadyExistsError,
    Cluster,
    ClusterError,
    FieldConflictError,
    NotFoundError,
)
from kvrouting_operator.pool import Object
from kvrouting_operator.resources.names import FIELD_MANAGER
from kvrouting_operator.router_report import PoolReport, RouterAddress

Key = tuple[str, str, str]


class FakeCluster:
    """objects: (kind, namespace, name) → object. requests: (verb, kind) in order. failing: (verb, kind) → error that is
    raised. taken: fields of spec that somebody else owns, by (kind, name).
    """

    def __init__(self, *objects: Object) -> None:
        self.objects: dict[Key, Object] = {}
        self.requests: list[tuple[str, str]] = []
        self.failing: dict[tuple[str, str], ClusterError] = {}
        self.taken: dict[tuple[str, str], set[str]] = {}
        for body in objects:
            self.objects[self.key(body)] = copy.deepcopy(body)

    @staticmethod
    def key(body: Object) -> Key:
        """Of an object."""
        return body["kind"], body["metadata"].get("namespace", ""), body["metadata"]["name"]

    def _asked(self, verb: str, kind: str) -> None:
        self.requests.append((verb, kind))
        if (verb, kind) in self.failing:
            raise self.failing[verb, kind]

    def get(self, kind: str, namespace: str | None, name: str) -> Object | None:
        """See Cluster."""
        self._asked("get", kind)
        return copy.deepcopy(self.objects.get((kind, namespace or "", name)))

    def find(self, kind: str, namespace: str | None, *, selector: str = "") -> list[Object]:
        """See Cluster."""
        self._asked("list", kind)
        wanted = dict(part.split("=") for part in selector.split(",") if part)
        return [
            copy.deepcopy(o)
            for (k, ns, _), o in self.objects.items()
            if k == kind and namespace in (None, ns) and wanted.items() <= o["metadata"].get("labels", {}).items()
        ]

    def create(self, body: Object) -> Object:
        """See Cluster."""
        self._asked("create", body["kind"])
        made = copy.deepcopy(body)
        if "generateName" in made["metadata"]:
            made["metadata"]["name"] = f"{made['metadata']['generateName']}{len(self.objects)}"
        if self.key(made) in self.objects:
            raise AlreadyExistsError(f"{self.key(made)} exists")
        if "stringData" in made:
            import base64

            made["data"] = {k: base64.b64encode(v.encode()).decode() for k, v in made.pop("stringData").items()}
        self.objects[self.key(made)] = made
        return copy.deepcopy(made)

    def apply(self, body: Object, *, force: bool = False, manager: str = FIELD_MANAGER) -> Object:
        """See Cluster."""
        self._asked("apply", body["kind"])
        held = self.objects.get(self.key(body), {})
        for field in self.taken.get((body["kind"], body["metadata"]["name"]), set()):
            if not force and held.get("spec", {}).get(field) != body.get("spec", {}).get(field):
                raise FieldConflictError(f'conflict with "kubectl-edit": .spec.{field}')
        metadata = {
            "uid": f"uid-{body['kind']}-{body['metadata']['name']}",
            **held.get("metadata", {}),
            **body["metadata"],
        }
        merged = {**held, **copy.deepcopy(body), "metadata": metadata}
        self.objects[self.key(body)] = merged
        return copy.deepcopy(merged)

    def apply_status(self, body: Object) -> Object:
        """See Cluster."""
        self._asked("apply_status", body["kind"])
        if self.key(body) not in self.objects:
            raise NotFoundError(f"{self.key(body)} is gone")
        self.objects[self.key(body)]["status"] = copy.deepcopy(body["status"])
        return body

    def check_watch(self, kind: str, namespace: str | None, *, selector: str = "") -> None:
        """See Cluster."""
        self._asked("watch", kind)

    def version(self) -> tuple[int, int]:
        """See Cluster."""
        return 1, 34

    def of_kind(self, kind: str) -> list[Object]:
        """All objects of a kind."""
        return [o for (k, _, _), o in self.objects.items() if k == kind]


class FakeRouters:
    """Routers that answer what they are told to. asked: addresses of each round."""

    def __init__(self, report: PoolReport | None = None) -> None:
        self.report = report or PoolReport()
        self.asked: list[list[RouterAddress]] = []

    def __call__(self, routers: Iterable[RouterAddress], *, block_size_tokens: int) -> PoolReport:
        """See ReportFetcher."""
        self.asked.append(list(routers))
        return self.report


def as_cluster(fake: FakeCluster) -> Cluster:
    """The type checker's proof that the fake keeps the protocol."""
    return fake
