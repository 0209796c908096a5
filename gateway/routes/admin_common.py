"""Parts that all admin routes share: the actor, the decoded body, the answer to a change."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import msgspec
from litestar import Request, Response

from gateway.http.authentication import principal_of
from gateway.http.client_address import client_of
from gateway.requests.schemas import decode
from gateway.routes.context import body_of, gateway_of, json_response
from tenants.admin.audit import Actor

T = TypeVar("T", bound=msgspec.Struct)
READ = {"scope": "admin:read"}
WRITE = {"scope": "admin:write"}


async def asked(request: Request[Any, Any, Any], into: type[T]) -> T:
    """The decoded body. Raises `ApiError`."""
    return decode(await body_of(request), into)


async def changed(request: Request[Any, Any, Any], shown: object, status: int = 200) -> Response[bytes]:
    """Answers once the change is in force in this gateway."""
    await gateway_of(request).deps.directory.refresh()
    return json_response(shown, status)


async def named(request: Request[Any, Any, Any], shown: Mapping[str, Any]) -> dict[str, Any]:
    """One thing as shown, with names beside its ids."""
    return (await gateway_of(request).deps.admin.with_names([shown]))[0]


async def listed(request: Request[Any, Any, Any], items: Iterable[Mapping[str, Any]]) -> Response[bytes]:
    """A list as shown, with names beside ids."""
    data = await gateway_of(request).deps.admin.with_names(items)
    return json_response({"object": "list", "data": data})


def actor(request: Request[Any, Any, Any]) -> Actor:
    """The acting key and its client address, for the audit."""
    principal = principal_of(request)
    address = client_of(request.scope, gateway_of(request).deps.config.trusted_proxies)
    name = "control" if principal.key_id == "control" else f"key:{principal.key_prefix}"
    return Actor(name, "" if address is None else str(address))
