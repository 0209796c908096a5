"""Parts that all routes share: the gateway behind a request, its body, and a JSON response."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from litestar import Request, Response
from litestar.types import ASGIApp, Receive, Scope, Send

from gateway.domain.tiers import SERVICE_TIERS, tier_named
from gateway.fair_threads import INLINE_BYTES
from gateway.http.asgi import SIBLING, headers_of
from gateway.http.authentication import principal_of
from gateway.http.request_body import declared_length, read_json_body
from gateway.requests.inputs.large_bodies import LargeBody
from gateway.requests.schemas import decode
from tenants.types import Principal

if TYPE_CHECKING:
    from gateway.gateway import Gateway
    from tenants.admin.admin import Admin

T = TypeVar("T")

S = TypeVar("S", bound=msgspec.Struct)


def gateway_of(request: Request[Any, Any, Any]) -> Gateway:
    gateway: Gateway = request.app.state.gateway
    return gateway


def is_of_sibling(request: Request[Any, Any, Any]) -> bool:
    """Another worker of the port asks, for what this one alone has."""
    return SIBLING in request.scope["state"]


def admin_of(request: Request[Any, Any, Any]) -> Admin:
    return gateway_of(request).deps.admin


async def body_of(request: Request[Any, Any, Any]) -> bytes:
    """The body, within the configured size and time. Raises `ApiError`."""
    config = gateway_of(request).deps.config
    return await read_json_body(request, config.max_body_bytes, config.body_timeout_s)


def reserved_memory(request: Request[Any, Any, Any]) -> LargeBody:
    gateway = gateway_of(request)
    return LargeBody(
        gateway.large_bodies, principal_of(request).tenant_id, gateway.deps.config.max_body_bytes
    )


async def large_body_of(request: Request[Any, Any, Any], reserved: LargeBody) -> bytes:
    """The body, as large as a model of the key takes it (`ModelPool.body_limit`). Raises `ApiError`."""
    gateway = gateway_of(request)
    config = gateway.deps.config
    declared, most_bytes = declared_length(request.scope), config.max_body_bytes
    if declared is None or declared > most_bytes:
        most_bytes = gateway.models.largest_body(principal_of(request).models)
    return await read_json_body(request, most_bytes, config.body_timeout_s, reserved.grow)


def then_closing(answer: ASGIApp, reserved: LargeBody) -> ASGIApp:
    """The answer; once it is sent, or has failed, the memory of its body is free."""
    if not reserved.is_counted:
        return answer

    async def answered(scope: Scope, receive: Receive, send: Send) -> None:
        with reserved:
            await answer(scope, receive, send)

    return answered


async def off_the_loop(gateway: Gateway, principal: Principal, body: bytes, work: Callable[[], T]) -> T:
    """The result of `work`, computed in a thread unless `body` is small. Raises `TooManyWaiting`."""
    if len(body) <= INLINE_BYTES:
        return work()
    return await gateway.deps.threads.run(principal.tenant_id, work)


async def asked(request: Request[Any, Any, Any], into: type[S]) -> S:
    """The decoded body. Raises `ApiError`."""
    return decode(await body_of(request), into)


async def asked_or_not(request: Request[Any, Any, Any], into: type[S]) -> S:
    """The decoded body; without one, what is so by default. Raises `ApiError`."""
    headers = headers_of(request.scope)
    has_body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
    return await asked(request, into) if has_body else into()


def note_asked(request: Request[Any, Any, Any], model: str, service_tier: str) -> None:
    """Notes model and tier for a record if the request is refused; `service_tier` empty: no tier."""
    request.scope["state"]["asked"] = model, service_tier


def asked_of(request: Request[Any, Any, Any]) -> tuple[str, str]:
    """Model and tier that a request names, allowed or not; empty: none yet, or no such tier."""
    state = request.scope["state"]
    model, service_tier = state.get("asked", ("", ""))
    if service_tier not in SERVICE_TIERS:
        return model, ""
    return model, tier_named(service_tier, principal_of(request).default_tier).value


def may_use(request: Request[Any, Any, Any], model: str) -> bool:
    allowed = principal_of(request).models
    return allowed is None or model in allowed


def json_response(value: object, status: int = 200) -> Response[bytes]:
    """`value` as JSON; infinities become null."""
    return Response(msgspec.json.encode(value), status_code=status, media_type="application/json")
