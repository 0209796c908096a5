"""What every route needs: the gateway behind a request, and a JSON response."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from litestar import Request, Response

if TYPE_CHECKING:
    from gateway.runtime import Gateway


def gateway_of(request: Request[Any, Any, Any]) -> Gateway:
    """The gateway that serves this request."""
    gateway: Gateway = request.app.state.gateway
    return gateway


def json_response(value: object, status: int = 200) -> Response[bytes]:
    """`value` as JSON; infinities become null."""
    return Response(msgspec.json.encode(value), status_code=status, media_type="application/json")
