"""Runs a route's handler without the framework's parameters, dependencies and response objects.

For the routes that every model request takes: handlers get only the request and return an ASGI application.
The framework's work for others (guard copies, parameters, exit stack) costs more than reading the body.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, cast

from litestar import Request
from litestar.types import ASGIApp, Receive, Scope, Send


def run_directly(app: ASGIApp) -> ASGIApp:
    """In place of `app`, the framework's own: the guards, the handler, its response."""

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        handler = scope["route_handler"]
        request: Request[Any, Any, Any] = Request(scope, receive, send)
        for guard in handler.resolve_guards():
            await cast(Awaitable[None], guard(request, handler))
        response = await handler.fn(request)
        await response(scope, receive, send)

    return run
