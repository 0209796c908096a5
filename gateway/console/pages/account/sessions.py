"""The page of sessions: one's own, and everyone's for roles that may see them."""

from __future__ import annotations

from litestar import Response

from gateway.console.access import form, page, visit_of
from gateway.console.rendering import page_response, redirect
from gateway.console.return_path import with_query
from gateway.http.asgi import Request
from gateway.routes.context import gateway_of
from tenants.errors import NotFound
from tenants.people.roles import Act
from tenants.people.sessions import Session

PATH = "/console/sessions"
MOST_SHOWN = 100


@page(PATH)
async def sessions_page(request: Request) -> Response[str]:
    visit, deps = visit_of(request), gateway_of(request).deps
    assert visit.session is not None
    own = await deps.people.sessions_of(visit.person)
    others: list[Session] = []
    next_page = ""
    if visit.person.may(Act.READ_PEOPLE):
        cursor = request.query_params.get("cursor")
        sessions = await deps.admin.person_sessions.page(
            rules=deps.people.rules, cursor=cursor, limit=MOST_SHOWN
        )
        others = [row for row in sessions.rows if row.person.person_id != visit.person.person_id]
        next_page = with_query(PATH, {"cursor": sessions.next_cursor}) if sessions.next_cursor else ""
    return page_response(
        "account/sessions.html",
        visit,
        own=newest_first(own),
        others=newest_first(others),
        this_id=visit.session.session_id,
        next_page=next_page,
        has_ended="ended" in request.query_params,
    )


@form(f"{PATH}/end")
async def end_own_session(request: Request) -> Response[str]:
    visit, deps = visit_of(request), gateway_of(request).deps
    wanted = visit.form.get("session", "")
    own = await deps.people.sessions_of(visit.person)
    session_row = next((session for session in own if session.session_id == wanted), None)
    if session_row is None:
        raise NotFound("session", wanted)
    await deps.admin.person_sessions.end(visit.actor, session_row.session_id, of=session_row.person.person_id)
    return redirect(with_query(PATH, {"ended": "1"}))


def newest_first(sessions: list[Session]) -> list[Session]:
    return sorted(sessions, key=lambda session: (-session.seen_us, session.session_id))


HANDLERS = [sessions_page, end_own_session]
