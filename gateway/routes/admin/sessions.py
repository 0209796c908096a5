"""Admin routes: sessions of people in the console."""

from __future__ import annotations

from litestar import Response, delete, get
from litestar.params import FromPath, FromQuery

from gateway.http.asgi import Request
from gateway.routes.admin.common import PAGED, WRITE, actor, paged
from gateway.routes.context import admin_of, gateway_of, json_response
from tenants.admin.cursor import PAGES
from tenants.people.sessions import Session


@get(
    "/admin/v1/sessions",
    opt=PAGED,
    summary="List sessions in the console that are valid now",
    description=f"Of one `person` (id or name), or of all. {PAGES}",
)
async def list_sessions(
    request: Request,
    person: FromQuery[str | None] = None,
    cursor: FromQuery[str | None] = None,
    limit: FromQuery[int] = 100,
) -> Response[bytes]:
    sessions, rules = admin_of(request).person_sessions, gateway_of(request).deps.people.rules
    page = await sessions.page(person=person, rules=rules, cursor=cursor, limit=limit)
    return await paged(request, page, Session.as_json)


@delete(
    "/admin/v1/sessions/{session:str}",
    status_code=200,
    opt=WRITE,
    summary="Log one browser out, in every gateway",
)
async def end_session(request: Request, session: FromPath[str]) -> Response[bytes]:
    ended = await admin_of(request).person_sessions.end(actor(request), session)
    return json_response(ended.as_json())


HANDLERS = [list_sessions, end_session]
