"""The Cluster of a real API server, by the synchronous `kubernetes` client."""

from __future__ import annotations

import json
from typing import Any

import urllib3
from kubernetes import client, config, dynamic
from kubernetes.dynamic.exceptions import ConflictError, DynamicApiError

from kvrouting_operator.cluster import (
    KINDS,
    AlreadyExistsError,
    ClusterError,
    FieldConflictError,
    NotFoundError,
    RejectedError,
    UnavailableError,
)
from kvrouting_operator.pool import Object
from kvrouting_operator.resources.names import FIELD_MANAGER

_APPLY = "application/apply-patch+yaml"
_PAGE = 500
_UNTYPED = "failed to create typed patch object"
# Try again later: too many requests (also while a new CRD's storage is made), time-outs and faults of the server.
_RETRY = {408, 429, 500, 502, 503, 504}


class _NoDiscovery:
    """The paths are known (cluster.KINDS): the client need not ask for them."""

    def __init__(self, client: object, cache_file: object) -> None:
        del client, cache_file


class KubernetesCluster:
    """limit_s: time-out of every request. parallel: connections that are kept."""

    def __init__(self, configuration: client.Configuration, *, limit_s: float, parallel: int) -> None:
        configuration.connection_pool_maxsize = parallel
        # The queue backs off; a retry inside a request would hide that and multiply the time-out.
        configuration.retries = urllib3.Retry(total=0)
        self._api = client.ApiClient(configuration)
        self._client = dynamic.DynamicClient(self._api, discoverer=_NoDiscovery)  # type: ignore[no-untyped-call]
        self._limit_s = limit_s

    def get(self, kind: str, namespace: str | None, name: str) -> Object | None:
        """See Cluster."""
        try:
            return self._request("get", KINDS[kind].path(namespace, name))
        except NotFoundError:
            return None

    def find(self, kind: str, namespace: str | None, *, selector: str = "") -> list[Object]:
        """See Cluster. Asks for pages, so that a large namespace is no single large answer."""
        found: list[Object] = []
        more = ""
        while True:
            query: dict[str, Any] = {"limit": _PAGE}
            if selector:
                query["label_selector"] = selector
            if more:
                query["_continue"] = more
            page = self._request("get", KINDS[kind].path(namespace), **query)
            found += page["items"]
            more = page.get("metadata", {}).get("continue", "")
            if not more:
                return [{"apiVersion": KINDS[kind].api_version, "kind": kind, **item} for item in found]

    def create(self, body: Object) -> Object:
        """See Cluster."""
        path = KINDS[body["kind"]].path(body["metadata"].get("namespace"))
        try:
            return self._request("post", path, body=body, field_manager=FIELD_MANAGER)
        except FieldConflictError as error:
            raise AlreadyExistsError(str(error)) from error

    def apply(self, body: Object, *, force: bool = False, manager: str = FIELD_MANAGER) -> Object:
        """See Cluster."""
        return self._apply(body, "", force=force, manager=manager)

    def apply_status(self, body: Object) -> Object:
        """See Cluster."""
        return self._apply(body, "/status", force=True, manager=FIELD_MANAGER)

    def check_watch(self, kind: str, namespace: str | None, *, selector: str = "") -> None:
        """See Cluster. The answer's beginning is enough: nothing of it is read."""
        query: dict[str, Any] = {"watch": "true", "timeout_seconds": 1}
        if selector:
            query["label_selector"] = selector
        self._send("get", KINDS[kind].path(namespace), **query).close()

    def version(self) -> tuple[int, int]:
        """See Cluster."""
        told = self._request("get", "/version")
        return int(told["major"]), int("".join(c for c in told["minor"] if c.isdigit()))

    def close(self) -> None:
        """Ends the connections."""
        self._api.close()  # type: ignore[no-untyped-call]

    def _apply(self, body: Object, subresource: str, *, force: bool, manager: str) -> Object:
        metadata = body["metadata"]
        path = KINDS[body["kind"]].path(metadata.get("namespace"), metadata["name"]) + subresource
        # A bool would be written as `True`, which the API server does not take.
        forced = "true" if force else None
        return self._request(
            "patch", path, body=body, content_type=_APPLY, field_manager=manager, force_conflicts=forced
        )

    def _request(self, method: str, path: str, **options: Any) -> Object:
        try:
            answer = json.loads(self._send(method, path, **options).data)
        except (urllib3.exceptions.HTTPError, OSError, json.JSONDecodeError) as error:
            raise UnavailableError(f"{method} {path}: {error}") from error
        assert isinstance(answer, dict)  # noqa: S101
        return answer

    def _send(self, method: str, path: str, **options: Any) -> urllib3.HTTPResponse:
        """A good answer, whose body is still to be read. Raises: ClusterError."""
        try:
            response: urllib3.HTTPResponse = self._client.request(
                method,
                path,
                _request_timeout=self._limit_s,
                query_params=[],
                header_params={},
                serialize=False,
                **options,
            )
        except DynamicApiError as error:
            raise translated(error) from error
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise UnavailableError(f"{method} {path}: {error}") from error
        return response


def translated(error: DynamicApiError) -> ClusterError:
    """The API's error as one of ours, with the server's own message."""
    message = _message(error)
    if isinstance(error, ConflictError) or error.status == 409:
        return FieldConflictError(message)
    if error.status == 404:
        return NotFoundError(message)
    if _UNTYPED in message:
        return RejectedError(message)  # a field that no such object has; the API server calls it its own fault (500)
    if error.status in _RETRY or error.status == 401:
        return UnavailableError(f"{error.status}: {message}")
    return RejectedError(message)


def _message(error: DynamicApiError) -> str:
    try:
        return str(json.loads(error.body or "")["message"])
    except (ValueError, KeyError, TypeError):
        return str(error.body or error.reason)


def load_configuration(kubeconfig: str | None) -> client.Configuration:
    """Of the pod's ServiceAccount, or of a kubeconfig file. Raises: ConfigException."""
    configuration = client.Configuration()
    if kubeconfig is None:
        config.load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
    else:
        config.load_kube_config(  # type: ignore[no-untyped-call]
            config_file=kubeconfig, client_configuration=configuration
        )
    return configuration
