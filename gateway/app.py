"""Builds the ASGI application: routes, exception handlers, lifespan."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from litestar import Litestar, Request, Response
from litestar.datastructures import State
from litestar.exceptions import MethodNotAllowedException, NotFoundException

from gateway import errors
from gateway.deps import GatewayDeps
from gateway.error_mapping import as_api_error
from gateway.gateway import Gateway
from gateway.http.asgi import add_standard_headers, begin
from gateway.http.authentication import require_scope
from gateway.http.request_body import declared_length
from gateway.routes import admin_requests, admin_tenants, health, inference, openapi, quotes, requests

HANDLERS = [
    *inference.HANDLERS,
    *quotes.HANDLERS,
    *requests.HANDLERS,
    *admin_requests.HANDLERS,
    *health.HANDLERS,
    *admin_tenants.HANDLERS,
    *openapi.HANDLERS,
]
"""Every route there is."""


def create_app(deps: GatewayDeps) -> Litestar:
    """The gateway as an ASGI application. Its lifespan recovers and opens; at the end it drains and settles.

    Raises `ValueError` for an inconsistent configuration.
    """
    gateway = Gateway(deps)

    @contextlib.asynccontextmanager
    async def lifespan(_: Litestar) -> AsyncIterator[None]:
        await gateway.start()
        try:
            yield
        finally:
            await gateway.stop()

    return Litestar(
        route_handlers=HANDLERS,
        guards=[require_scope],
        lifespan=[lifespan],
        exception_handlers={Exception: _refuse},
        before_send=[add_standard_headers],
        openapi_config=openapi.openapi_config(),
        state=State({"gateway": gateway}, deep_copy=False),
        # Bodies are read, bounded and decoded by `gateway/http/request_body.py`.
        request_max_body_size=None,
        logging_config=None,
    )


def _refuse(request: Request[Any, Any, Any], exception: Exception) -> Response[bytes]:
    """Every exception of every route, in OpenAI's shape."""
    request_id = begin(request.scope)
    path = request.scope.get("path", "")
    match exception:
        case NotFoundException():
            error = errors.not_found(path)
        case MethodNotAllowedException():
            error = errors.method_not_allowed(request.scope["method"], path)
        case _:
            error = as_api_error(exception, request_id)
    gateway: Gateway = request.app.state.gateway
    gateway.metrics.refused(error.code)
    headers = error.all_headers()
    declared = declared_length(request.scope)
    if declared is not None and declared > gateway.deps.config.max_body_bytes:
        # The body was not read and will not be.
        headers["connection"] = "close"
    return Response(error.body(), status_code=error.status, headers=headers, media_type="application/json")
