"""The router's HTTP surface: paths to handlers, errors to responses."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from aiohttp import web

from kvrouting_router.error_bodies import ErrorShape
from kvrouting_router.errors import NotReadyError, RouterError, UnknownPathError, WrongMethodError
from kvrouting_router.http_pages import Pages
from kvrouting_router.http_protocol import error_response
from kvrouting_router.metrics import RouterMetrics
from kvrouting_router.relay import Relay
from kvrouting_router.request_forms import Api

_logger = logging.getLogger(__name__)

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class HttpSurface:
    """All paths. Called by the server for each request."""

    def __init__(self, *, relay: Relay, pages: Pages, metrics: RouterMetrics) -> None:
        self._relay = relay
        self._pages = pages
        self._metrics = metrics
        self._apis = {api.value: api for api in Api}
        self._gets: dict[str, Handler] = pages.handlers()

    async def __call__(self, request: web.BaseRequest) -> web.StreamResponse:
        """One request; every error becomes a response in the API's own shape."""
        path = request.rel_url.raw_path
        api = self._apis.get(path)
        shape = api.error_shape if api else ErrorShape.OPENAI
        try:
            response = await (self._generate(request, api) if api else self._page(request, path))
        except RouterError as error:
            response = error_response(error, shape)
            self._metrics.rejected.labels(type(error).__name__).inc()
        except ConnectionError:
            raise  # the client is gone
        except Exception as error:
            _logger.exception("a request failed by a fault of the router", extra={"fields": {"path": path}})
            response = error_response(error, shape)
        if _is_body_under_way(request) and not response.prepared:
            # What still comes is this request's body: nothing else may be sent on the connection.
            response.force_close()
        self._metrics.responses.labels(path if api else "page", str(response.status)).inc()
        return response

    async def _generate(self, request: web.BaseRequest, api: Api) -> web.StreamResponse:
        if request.method != "POST":
            raise WrongMethodError(f"{api.value} takes POST, got {request.method}")
        not_ready = self._pages.why_not_serving()
        if not_ready:
            raise NotReadyError(not_ready)
        return await self._relay.serve(request, api)

    async def _page(self, request: web.BaseRequest, path: str) -> web.StreamResponse:
        handler = self._gets.get(path)
        if handler is None:
            raise UnknownPathError(f"there is nothing at {path!r}")
        if request.method != "GET":
            raise WrongMethodError(f"{path} takes GET, got {request.method}")
        return await handler(request)


def _is_body_under_way(request: web.BaseRequest) -> bool:
    """Whether the answer comes before the request is whole: refused by its headers, too large, too slow or broken."""
    return not request.content.is_eof() or request.content.exception() is not None
