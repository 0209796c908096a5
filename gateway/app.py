"""Builds the ASGI application: routes, exception handlers, lifespan."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from functools import cache
from typing import Any

from litestar import HttpMethod, Litestar, Response, route
from litestar.config.cors import CORSConfig
from litestar.datastructures import State
from litestar.exceptions import MethodNotAllowedException, NotFoundException
from litestar.handlers import HTTPRouteHandler

from gateway.console import handlers as console
from gateway.console import refusals as console_refusals
from gateway.console.live.hub import LiveHub
from gateway.deps import GatewayDeps
from gateway.error_mapping import as_api_error
from gateway.errors import ApiError
from gateway.gateway import Gateway
from gateway.http.accesses import note_refused
from gateway.http.asgi import TRACE, Request, add_standard_headers, begin, read_trace
from gateway.http.authentication import require_scope
from gateway.http.request_body import declared_length
from gateway.http.unknown_routes import method_not_allowed, not_found
from gateway.metrics.gen_ai import OPERATIONS, OTHER
from gateway.records.refusal_recorder import UNKNOWN
from gateway.requests.dialects import messages
from gateway.routes import (
    dialects,
    health,
    inference,
    openapi,
    quotes,
    requests,
    resource_routes,
    tokens,
    usage,
    vectors,
)
from gateway.routes import sessions as agent_sessions
from gateway.routes.admin import handlers as admin
from gateway.routes.admin import requests as admin_requests
from gateway.routes.context import asked_of
from gateway.trace_context import RequestTrace, TraceContext
from gateway.tracing.build import RefusedTrace
from gateway.workers.workers import counts_of
from tenants.resources.all import RESOURCES
from tenants.resources.resource import Resource

_ROUTES = [
    *inference.HANDLERS,
    *dialects.HANDLERS,
    *vectors.HANDLERS,
    *quotes.HANDLERS,
    *tokens.HANDLERS,
    *requests.HANDLERS,
    *usage.HANDLERS,
    *agent_sessions.HANDLERS,
    *admin_requests.HANDLERS,
    *health.HANDLERS,
    *admin.HANDLERS,
    *openapi.HANDLERS,
]


def _complete(handlers: list[HTTPRouteHandler]) -> list[HTTPRouteHandler]:
    """Adds HEAD to each GET, and to each path an OPTIONS with all its methods (not one handler's)."""
    methods: dict[str, set[str]] = defaultdict(set)
    for handler in handlers:
        if "GET" in handler.http_methods:
            handler.http_methods |= {"HEAD"}
        for path in handler.paths:
            methods[path] |= handler.http_methods
    complete = [*(_options(path, there) for path, there in methods.items()), *handlers]
    for handler in complete:
        _ = handler.parsed_fn_signature  # kept by it: read once, and not for each application
    return complete


def _options(path: str, methods: set[str]) -> HTTPRouteHandler:
    allow = ", ".join(sorted(methods | {"OPTIONS"}))

    @route(path, http_method=[HttpMethod.OPTIONS], include_in_schema=False)
    async def options() -> Response[None]:
        return Response(None, status_code=204, headers={"allow": allow})

    return options


Resources = tuple[Resource[Any], ...]


@cache
def handlers(resources: Resources = RESOURCES) -> list[HTTPRouteHandler]:
    """Of every route and page."""
    return _complete([*_ROUTES, *resource_routes.handlers(resources), *console.handlers(resources)])


def create_app(deps: GatewayDeps) -> Litestar:
    """The gateway as an ASGI application. Raises `ValueError` for an inconsistent configuration."""
    gateway = Gateway(deps)
    live = LiveHub(gateway.metrics.registry, shared=counts_of(deps.workers, "live pages"))

    @contextlib.asynccontextmanager
    async def lifespan(app: Litestar) -> AsyncIterator[None]:
        try:
            await gateway.start()
        except Exception as error:
            app.state.start_failure = error  # the server would only log it, in the group of Litestar's tasks
            raise
        try:
            yield
        finally:
            await live.close()
            await gateway.stop()

    state = State({"gateway": gateway, "live": live}, deep_copy=False)
    return register_routes(deps.config.cors_origins, state, lifespan, deps.resources)


def register_routes(
    cors_origins: tuple[str, ...],
    state: State,
    lifespan: Callable[[Litestar], contextlib.AbstractAsyncContextManager[None]],
    resources: Resources = RESOURCES,
) -> Litestar:
    """An application with all routes. Registering them takes half a second of processor time."""
    return Litestar(
        route_handlers=handlers(resources),
        guards=[require_scope],
        lifespan=[lifespan],
        exception_handlers={Exception: _refuse},
        before_send=[add_standard_headers],
        openapi_config=openapi.openapi_config(),
        cors_config=_cross_origin(cors_origins),
        state=state,
        # Bodies are read, bounded and decoded by `gateway/http/request_body.py`.
        request_max_body_size=None,
        logging_config=None,
    )


def _cross_origin(origins: tuple[str, ...]) -> CORSConfig | None:
    """CORS for browser applications of these origins; no credentials, as keys travel in a header."""
    return CORSConfig(allow_origins=list(origins), expose_headers=["*"]) if origins else None


def _refuse(request: Request, exception: Exception) -> Response[bytes] | Response[str]:
    """Every exception of every route in its API's shape; of the console, as a page."""
    request_id = begin(request.scope)
    path = request.scope.get("path", "")
    if console_refusals.is_console(path):
        return console_refusals.answer(request, exception, request_id)
    match exception:
        case NotFoundException():
            error = not_found(path)
        case MethodNotAllowedException(headers=allowed):
            error = method_not_allowed(request.scope["method"], path, (allowed or {}).get("allow", ""))
        case _:
            error = as_api_error(exception, request_id)
    gateway: Gateway = request.app.state.gateway
    model, tier = asked_of(request)
    caller = request.scope["state"].get("caller", UNKNOWN)
    gateway.refusals.note(error, request_id, caller, model=model, tier=tier)
    note_refused(request.scope, gateway, error.status, error.code)
    if (operation := OPERATIONS.get(path)) is not None:
        known = model if not model or model in gateway.models.catalogue.names() else OTHER
        duration_s = time.perf_counter() - request.scope["state"]["arrived_s"]
        gateway.metrics.gen_ai.refused(operation, known, error.code, duration_s)
        _trace_refused(request, request_id, error, duration_s)
    headers = error.all_headers()
    declared = declared_length(request.scope)
    if declared is not None and declared > gateway.deps.config.max_body_bytes:
        # The body was not read and will not be.
        headers["connection"] = "close"
    body = messages.refused(error, request_id, path)
    return Response(body, status_code=error.status, headers=headers, media_type="application/json")


def _trace_refused(request: Request, request_id: str, error: ApiError, duration_s: float) -> None:
    """A refused request held nothing and has no timeline."""
    deps: GatewayDeps = request.app.state.gateway.deps
    if deps.tracer is None:
        return
    read_trace(request.scope)  # a key that is refused is refused before
    caller: TraceContext | None = request.scope["state"].get(TRACE)
    if caller is not None:
        now_ns = round(deps.wall_clock() * 1e9)
        begun_ns = now_ns - round(duration_s * 1e9)
        path = request.scope["path"]
        trace = RequestTrace.of(request_id, caller)
        deps.tracer.refuse(RefusedTrace(trace, path, begun_ns, now_ns, error.status, error.code))
