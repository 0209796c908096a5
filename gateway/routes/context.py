"""Parts that all routes share: the gateway behind a request, its body, and a JSON response."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from litestar import Request, Response

from gateway.http.authentication import principal_of
from gateway.http.request_body import read_json_body

if TYPE_CHECKING:
    from gateway.gateway import Gateway

T = TypeVar("T")
LARGE_BODY_BYTES = 32 * 1024
"""A larger body is parsed and tokenised in a thread, so that it does not stall other requests' streams."""


def gateway_of(request: Request[Any, Any, Any]) -> Gateway:
    """The gateway that serves this request."""
    gateway: Gateway = request.app.state.gateway
    return gateway


async def body_of(request: Request[Any, Any, Any]) -> bytes:
    """The body, within the configured size and time. Raises `ApiError`."""
    config = gateway_of(request).deps.config
    return await read_json_body(request, config.max_body_bytes, config.body_timeout_s)


async def in_thread_if_large(body: bytes, work: Callable[[], T]) -> T:
    """The result of `work`, which reads `body`."""
    if len(body) > LARGE_BODY_BYTES:
        return await asyncio.to_thread(work)
    return work()


def may_use(request: Request[Any, Any, Any], model: str) -> bool:
    """Whether the request's key may use a model."""
    allowed = principal_of(request).models
    return allowed is None or model in allowed


def json_response(value: object, status: int = 200) -> Response[bytes]:
    """`value` as JSON; infinities become null."""
    return Response(msgspec.json.encode(value), status_code=status, media_type="application/json")
