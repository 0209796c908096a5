"""How do completions get to their handlers without what the framework does for every request?

Routing, guards, parsing of arguments and wrapping of answers cost more than all that our handlers do before
they queue a request. So the routes that say `streams` are called straight: the same handler, after the same
guard, with the same table of refusals and the same hook before sending. Whatever is unusual about a request's
target (another spelling of the path, a mounted application, a strange host) goes through the framework, which
is the plain way, and the one that every other route goes.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Any, cast

from litestar import Litestar, Request
from litestar.enums import ScopeType
from litestar.handlers import HTTPRouteHandler
from litestar.types import (
    ASGIApp,
    HTTPScope,
    Message,
    Receive,
    Send,
)

from gateway.http.asgi import add_standard_headers
from gateway.http.authentication import require_scope

Refuse = Callable[[Send, Request[Any, Any, Any], Exception], Awaitable[None]]
Handle = Callable[[Request[Any, Any, Any]], Awaitable[ASGIApp]]

_PLAIN_HOST = re.compile(rb"[0-9A-Za-z.:\-\[\]]+")


class Application(Litestar):
    """The framework's application, with a shorter way for completions."""

    def __init__(self, *, refuse: Refuse, **options: Any) -> None:
        """`refuse` tells a client why its request failed; `options` are the framework's."""
        super().__init__(**options)
        self._refuse = refuse
        self._straight: dict[str, HTTPRouteHandler] = {
            route.path: handler
            for route in self.routes
            for handler in getattr(route, "route_handlers", ())
            if handler.opt.get("streams") and handler.http_methods == {"POST"}
        }

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """The ASGI application."""
        if scope["type"] == ScopeType.HTTP:
            handler = self._straight.get(scope["path"])
            if handler is not None and _is_plain(scope):
                await self._call(handler, scope, receive, send)
                return
        await super().__call__(scope, receive, send)

    async def _call(self, handler: HTTPRouteHandler, scope: HTTPScope, receive: Receive, send: Send) -> None:
        scope["app"] = scope["litestar_app"] = self
        scope.setdefault("state", {})
        has_begun = False

        async def send_on(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                await add_standard_headers(message, scope)
            await send(message)

        request: Request[Any, Any, Any] = Request(scope, receive, send_on)
        try:
            await require_scope(request, handler)
            answer = await cast(Handle, handler.fn)(request)
            await answer(scope, receive, send_on)
        except Exception as exception:
            if has_begun:
                raise
            await self._refuse(send_on, request, exception)


def _is_plain(scope: HTTPScope) -> bool:
    """Whether the framework would take its target for the route that has this very path."""
    if scope["method"] != "POST" or scope.get("root_path"):
        return False
    for name, value in scope["headers"]:
        if name == b"host":
            return _PLAIN_HOST.fullmatch(value) is not None
    return False
