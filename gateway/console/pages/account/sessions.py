"""The page of sessions: the own ones, and those of all people for roles that may see them."""

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
    """A session as shown."""

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
    ordered = sorted(sessions, key=lambda each: (-each.seen_us, each.session_id))
    return [
        SessionRow(
            each.session_id,
            each.person.person_id,
            each.person.name,
            browser_of(each.user_agent),
            each.address or "unknown",
            each.created_us,
            each.seen_us,
            each.ends_us,
            each.session_id == this.session_id,
        )
        for each in ordered
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
    """What a browser calls itself, in short; its own words where they are unknown."""
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
        found = await deps.admin.page_sessions(rules=deps.people.rules, cursor=cursor, limit=MOST_SHOWN)
        others = [each for each in found.rows if each.person.person_id != visit.person.person_id]
        next_page = with_query(PATH, {"cursor": found.next_cursor}) if found.next_cursor else ""
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
    """Ends one of the person's own sessions. (Those of others are ended on their page.)"""
    visit, deps = visit_of(request), gateway_of(request).deps
    wanted = visit.form.get("session", "")
    own = await deps.people.sessions_of(visit.person)
    found = next((each for each in own if each.session_id == wanted), None)
    if found is None:
        raise NotFound("session", wanted)
    await deps.admin.end_session(visit.actor, found.session_id, of=found.person.person_id)
    return redirect(with_query(PATH, {"ended": "1"}))


HANDLERS = [sessions_page, end_own_session]
