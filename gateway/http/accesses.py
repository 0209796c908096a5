"""Records calls with a key for the audit: actors, admin reads and refusals."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from litestar.types import HTTPScope, Scope

from gateway.http.asgi import SIBLING, TRACE, begin
from gateway.http.client_address import client_of
from tenants.admin.audit import MAX_TEXT, Actor
from tenants.types import Principal

if TYPE_CHECKING:
    from gateway.gateway import Gateway

ASKER = "asker"
"""In a request's state: the principal of its key, whether or not it may call this route."""
ADMIN = "/admin/v1/"
REFUSED = (401, 403)
READ_SCOPE = "admin:read"


def actor_of(scope: Scope, gateway: Gateway) -> Actor:
    """The key behind a call and its origin; `unknown`: no such key."""
    state = scope["state"]
    asker: Principal | None = state.get(ASKER)
    if asker is not None:
        name = "control" if asker.key_id == "control" else f"key:{asker.key_prefix}"
    else:
        key_id = state["caller"][2] if "caller" in state else ""
        name = f"key:{key_id}" if key_id else "unknown"
    return Actor(name, *origin_and_ids(scope, gateway))


def origin_and_ids(scope: Scope, gateway: Gateway) -> tuple[str, None, str, str]:
    """An actor's other fields, in order: address, no person, request id, trace id."""
    address = client_of(scope, gateway.deps.config.trusted_proxies)
    trace = scope["state"].get(TRACE)
    return "" if address is None else str(address), None, begin(scope), trace.trace_id if trace else ""


def route_of(scope: Scope) -> str:
    asked = cast(HTTPScope, scope)
    return f"{asked['method']} {asked.get('path_template') or asked['path']}"[:MAX_TEXT]


def note_read(scope: Scope, gateway: Gateway) -> None:
    if SIBLING not in scope["state"]:  # noted by the worker that was asked
        gateway.accesses.note("access.read", actor_of(scope, gateway), route_of(scope))


def note_refused(scope: Scope, gateway: Gateway, status: int, code: str) -> None:
    """Audits a refused call of the admin API without a sufficient key."""
    if status in REFUSED and scope["path"].startswith(ADMIN):
        gateway.accesses.note("access.refuse", actor_of(scope, gateway), route_of(scope), code)
