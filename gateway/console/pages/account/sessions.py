"""The page of sessions: one's own, and everyone's for roles that may see them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from litestar import Request, Response

from gateway.console.access import form, page, visit_of
from gateway.console.rendering import page_response, redirect
from gateway.console.return_path import with_query
from gateway.routes.context import gateway_of
from tenants.errors import NotFound
from tenants.people.roles import Act
from tenants.people.sessions import Session

PATH = "/console/sessions"
MOST_SHOWN = 100


@dataclass(frozen=True)
class SessionRow:
    session_id: str
    person_id: str
    name: str
    browser: str
    address: str
    created_us: int
    seen_us: int
    ends_us: int
    is_this: bool


def rows(sessions: Iterable[Session], this: Session) -> list[SessionRow]:
    ordered = sorted(sessions, key=lambda session: (-session.seen_us, session.session_id))
    return [
        SessionRow(
            session.session_id,
            session.person.person_id,
            session.person.name,
            browser_of(session.user_agent),
            session.address or "unknown",
            session.created_us,
            session.seen_us,
            session.ends_us,
            session.session_id == this.session_id,
        )
        for session in ordered
    ]


_BROWSERS = {"Edg/": "Edge", "OPR/": "Opera", "Firefox/": "Firefox", "Chrome/": "Chrome", "Safari/": "Safari"}
_SYSTEMS = {
    "Android": "Android",
    "iPhone": "iOS",
    "iPad": "iOS",
    "Windows": "Windows",
    "Mac OS": "macOS",
    "Linux": "Linux",
}


def browser_of(user_agent: str) -> str:
    """A browser's short name, or its own words if it is unknown."""
    browser = next((name for mark, name in _BROWSERS.items() if mark in user_agent), "")
    system = next((name for mark, name in _SYSTEMS.items() if mark in user_agent), "")
    return " on ".join(word for word in (browser, system) if word) or user_agent[:60] or "unknown"


@page(PATH)
async def sessions_page(request: Request[Any, Any, Any]) -> Response[str]:
    visit, deps = visit_of(request), gateway_of(request).deps
    assert visit.session is not None
    own = await deps.people.sessions_of(visit.person)
    others: list[Session] = []
    next_page = ""
    if visit.person.may(Act.READ_PEOPLE):
        cursor = request.query_params.get("cursor")
        sessions = await deps.admin.page_sessions(rules=deps.people.rules, cursor=cursor, limit=MOST_SHOWN)
        others = [row for row in sessions.rows if row.person.person_id != visit.person.person_id]
        next_page = with_query(PATH, {"cursor": sessions.next_cursor}) if sessions.next_cursor else ""
    return page_response(
        "account/sessions.html",
        visit,
        own=rows(own, visit.session),
        others=rows(others, visit.session),
        next_page=next_page,
        has_ended="ended" in request.query_params,
    )


@form(f"{PATH}/end")
async def end_own_session(request: Request[Any, Any, Any]) -> Response[str]:
    visit, deps = visit_of(request), gateway_of(request).deps
    wanted = visit.form.get("session", "")
    own = await deps.people.sessions_of(visit.person)
    session_row = next((session for session in own if session.session_id == wanted), None)
    if session_row is None:
        raise NotFound("session", wanted)
    await deps.admin.end_session(visit.actor, session_row.session_id, of=session_row.person.person_id)
    return redirect(with_query(PATH, {"ended": "1"}))


HANDLERS = [sessions_page, end_own_session]
