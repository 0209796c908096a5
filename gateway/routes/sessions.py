"""Routes of sessions, the runs of agents: a tenant's own, and any tenant's for operators."""

from __future__ import annotations

from typing import Any

from litestar import Response, get
from litestar.params import FromPath, FromQuery

from gateway.http.asgi import Request
from gateway.http.authentication import principal_of
from gateway.routes.context import admin_of, json_response
from gateway.routes.openapi_fields import between
from tenants.admin.cursor import DEFAULT_PAGE, MAX_PAGE
from tenants.admin.lists.sessions import MOST_LISTED, MOST_READ, MOST_SUMMED

OWN: dict[str, Any] = {"scope": "usage:read", "parameters": {"limit": between(1, MAX_PAGE)}}
LISTED = (
    f"The {MOST_LISTED:,} that called last, the last first, each until a day after its last call; at most"
    f" `limit` (`has_more`: there are others), and of the newest {MOST_READ:,} calls. Sums are the ledger's;"
    f" of sessions with charges beyond {MOST_SUMMED:,} in one answer they are null."
)
SHOWN = "Its sums, also by model and outcome (`by`), and its `newest` calls, at most `limit`."


@get("/v1/sessions", opt=OWN, summary="List this tenant's sessions, with their sums", description=LISTED)
async def own_sessions(request: Request, limit: FromQuery[int] = DEFAULT_PAGE) -> Response[bytes]:
    return await _shown(request, principal_of(request).tenant_id, None, limit)


@get("/v1/sessions/{session:str}", opt=OWN, summary="Show one session and its calls", description=SHOWN)
async def own_session(
    request: Request, session: FromPath[str], limit: FromQuery[int] = DEFAULT_PAGE
) -> Response[bytes]:
    return await _shown(request, principal_of(request).tenant_id, session, limit)


@get(
    "/admin/v1/tenants/{tenant:str}/sessions",
    opt=OWN | {"scope": "admin:read"},
    summary="List a tenant's sessions, with their sums",
    description=f"{LISTED} With `session` this one alone: {SHOWN}",
)
async def sessions_of_tenant(
    request: Request,
    tenant: FromPath[str],
    session: FromQuery[str | None] = None,
    limit: FromQuery[int] = DEFAULT_PAGE,
) -> Response[bytes]:
    return await _shown(request, tenant, session, limit)


async def _shown(request: Request, tenant: str, session: str | None, limit: int) -> Response[bytes]:
    return json_response(await admin_of(request).sessions.read(tenant, session, limit=limit))


HANDLERS = [own_sessions, own_session, sessions_of_tenant]
