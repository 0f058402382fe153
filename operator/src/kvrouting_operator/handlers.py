"""kopf's side: its settings, and handlers that do nothing but hand over.

There is no handler for deletion, no daemon and no timer, so kopf sets no finalizer and writes nothing to any object.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import kopf
from kubernetes import client

from kvrouting_operator.crd import GROUP, PLURAL, VERSION
from kvrouting_operator.operation import Operation
from kvrouting_operator.resources.names import POOL_LABEL
from kvrouting_operator.settings import OperatorSettings

_logger = logging.getLogger(__name__)

# Refused credentials are tried again after so long.
_LOGIN_AGAIN_S = 5.0
# A watch is closed by the server after watch_s; the client waits so much longer before it gives up on it.
_CLIENT_GRACE_S = 15.0
_CONNECT_S = 10.0


HandOver = Callable[..., object]


class _EndlessPauses:
    """Seconds between tries of a request: a watch outlives any time in which the API server is away."""

    def __iter__(self) -> Iterator[float]:
        return itertools.chain((0.5, 1, 2, 4), itertools.repeat(8.0))


def kopf_settings(settings: OperatorSettings) -> kopf.OperatorSettings:
    """Everything that would otherwise wait without limit, or write to objects, is set."""
    kopf_settings = kopf.OperatorSettings()
    kopf_settings.peering.standalone = True
    kopf_settings.posting.enabled = False
    # kopf kills a process that outlives it by ten minutes. This one begins its watches anew and lives on.
    kopf_settings.process.ultimate_exiting_timeout = None
    kopf_settings.scanning.disabled = True
    kopf_settings.watching.server_timeout = settings.watch_s
    kopf_settings.watching.client_timeout = settings.watch_s + _CLIENT_GRACE_S
    kopf_settings.watching.connect_timeout = _CONNECT_S
    kopf_settings.watching.label_selectors["apps", "deployments"] = POOL_LABEL
    kopf_settings.watching.label_selectors["", "pods"] = POOL_LABEL
    kopf_settings.networking.request_timeout = settings.api_limit_s
    kopf_settings.networking.connect_timeout = _CONNECT_S
    kopf_settings.networking.error_backoffs = _EndlessPauses()
    kopf_settings.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix=GROUP)
    kopf_settings.persistence.diffbase_storage = kopf.AnnotationsDiffBaseStorage(prefix=GROUP)
    return kopf_settings


def build_registry(
    operation: Operation, configuration: client.Configuration, *, hand_over: HandOver
) -> kopf.OperatorRegistry:
    """All handlers. hand_over: calls a method of the operation in the operation's own loop."""
    registry = kopf.OperatorRegistry()

    logins = itertools.count()

    @kopf.on.login(id="login", registry=registry)
    async def login(**_: Any) -> kopf.ConnectionInfo:
        number = next(logins)
        if number:
            _logger.warning("credentials were refused", extra={"fields": {"pause_s": _LOGIN_AGAIN_S}})
            await asyncio.sleep(_LOGIN_AGAIN_S)
        return connection(configuration, number=number)

    @kopf.on.event(GROUP, VERSION, PLURAL, id="pool", registry=registry)
    async def pool(type: Any, body: kopf.Body, **_: Any) -> None:  # noqa: A002 - kopf's name
        hand_over(operation.pool_changed, type, body)

    @kopf.on.event("apps", "v1", "deployments", id="deployment", labels={POOL_LABEL: kopf.PRESENT}, registry=registry)
    async def deployment(body: kopf.Body, **_: Any) -> None:
        hand_over(operation.owned_changed, body)

    @kopf.on.event("", "v1", "pods", id="pod", labels={POOL_LABEL: kopf.PRESENT}, registry=registry)
    async def pod(body: kopf.Body, **_: Any) -> None:
        hand_over(operation.owned_changed, body)

    return registry


def connection(configuration: client.Configuration, *, number: int) -> kopf.ConnectionInfo:
    """The same server and credentials for kopf; asked for again whenever they are refused. number: of the login.

    What was refused once kopf takes for refused for good, and ends when there is nothing else. But a token may be good
    again, as after a restore of the cluster: a priority of its own makes each login's credentials different ones.
    """
    token = configuration.get_api_key_with_prefix("BearerToken", "authorization")
    scheme, _, value = (token or "").partition(" ")
    return kopf.ConnectionInfo(
        server=configuration.host,
        ca_path=configuration.ssl_ca_cert,
        insecure=not configuration.verify_ssl,
        scheme=scheme or None,
        token=value or None,
        certificate_path=configuration.cert_file,
        private_key_path=configuration.key_file,
        priority=number,
    )
