"""Authentication and scope checks.

A guard of every route with `opt={"scope": ...}` puts a `Principal` into the connection's state: the key's, or
the local CLI's with the control token. A key bound to networks is refused from other addresses.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from litestar.connection import ASGIConnection
from litestar.handlers import BaseRouteHandler
from litestar.types import Scope

from gateway import errors, key_errors
from gateway.http.accesses import ASKER, READ_SCOPE, note_read
from gateway.http.asgi import begin, headers_of, read_trace
from gateway.http.client_address import client_of
from gateway.log_context import CURRENT
from tenants.errors import KeyRejected
from tenants.networks import is_within
from tenants.types import SCOPES, Principal, Tier

if TYPE_CHECKING:
    from gateway.deps import GatewayDeps

CONTROL_SCOPES = frozenset(scope for scope in SCOPES if scope.startswith("admin:")) | {"usage:read"}
MAX_CREDENTIAL_CHARACTERS = 512

CONTROL = Principal(
    tenant_id="",
    tenant_name="control",
    project_id="",
    key_id="control",
    key_prefix="control",
    weight=1.0,
    scopes=CONTROL_SCOPES,
    default_tier=Tier.STANDARD,
    tiers=frozenset(),
    models=frozenset(),
)
"""The local CLI: may administer, not infer."""


def credential_of(headers: Mapping[str, str]) -> str:
    """From `Authorization: Bearer`, Azure's `api-key` or Anthropic's `x-api-key`; they must agree. Raises
    `ApiError` (401)."""
    found = [f"Bearer {headers[name].strip()}" for name in ("api-key", "x-api-key") if name in headers]
    if "authorization" in headers:
        found.append(headers["authorization"])
    credentials = {_of_bearer(header) for header in found}
    if len(credentials) > 1:
        raise key_errors.invalid_api_key("two_keys")
    return credentials.pop() if credentials else _of_bearer("")


def _of_bearer(authorization: str) -> str:
    scheme, _, credential = authorization.strip().partition(" ")
    credential = credential.strip()
    if scheme.lower() != "bearer" or not credential:
        raise key_errors.invalid_api_key("missing")
    if len(credential) > MAX_CREDENTIAL_CHARACTERS or not credential.isascii() or " " in credential:
        raise key_errors.invalid_api_key("malformed")
    return credential


def authenticate(deps: GatewayDeps, credential: str) -> Principal:
    """Raises `KeyRejected`, and `ApiError`: 401 for no key, 503 if the directory cannot be trusted."""
    if deps.control_token and hmac.compare_digest(credential.encode(), deps.control_token.encode()):
        return CONTROL
    return deps.directory.authenticate(credential, deps.wall_clock())


async def require_scope(connection: ASGIConnection[Any, Any, Any, Any], handler: BaseRouteHandler) -> None:
    """Guard: authenticates and checks the route's scope. Async, as a plain function would get a thread."""
    begin(connection.scope)
    if dropped := read_trace(connection.scope):
        connection.app.state.gateway.metrics.trace_dropped(dropped)
    scope = handler.opt.get("scope")
    if scope is None:
        return
    deps: GatewayDeps = connection.app.state.gateway.deps
    credential = credential_of(headers_of(connection.scope))
    try:
        principal = authenticate(deps, credential)
    except KeyRejected as rejected:
        principal = await _authenticate_again(connection.scope, deps, credential, rejected)
    connection.scope["state"]["caller"] = principal.ids
    connection.scope["state"][ASKER] = principal
    if principal.allow_from:
        address = client_of(connection.scope, deps.config.trusted_proxies)
        if address is None or not is_within(address, principal.allow_from):
            raise key_errors.address_not_allowed(address)
    if scope not in principal.scopes:
        raise errors.scope_missing(scope=scope)
    connection.scope["state"]["principal"] = principal
    if (context := CURRENT.get()) is not None:
        context.tenant_id = principal.tenant_id
    if principal is not CONTROL:
        connection.app.state.gateway.key_uses.note(principal.key_id)
    if scope == READ_SCOPE:
        note_read(connection.scope, connection.app.state.gateway)


async def _authenticate_again(
    scope: Scope, deps: GatewayDeps, credential: str, rejected: KeyRejected
) -> Principal:
    """Looks again for an unknown key, which may have just been created. Raises `ApiError` (401, 403)."""
    try:
        if rejected.reason == "unknown" and await deps.directory.look_again():
            return authenticate(deps, credential)
    except KeyRejected as again:
        rejected = again
    scope["state"]["caller"] = rejected.ids
    raise key_errors.key_rejected(rejected.reason) from None


def principal_of(connection: ASGIConnection[Any, Any, Any, Any]) -> Principal:
    principal: Principal = connection.scope["state"]["principal"]
    return principal
