"""Runs a route's handler without the framework's parameters, dependencies and response objects.

A middleware for the routes that every request of a model goes through: their handlers take the request and
nothing else, and return an ASGI application. What the framework does for other handlers (a copy of the
handler for each guard, a model of the parameters, an exit stack) would cost more than reading the body.
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
