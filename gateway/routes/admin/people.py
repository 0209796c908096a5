"""Admin routes: people who may log in to the console, and their sessions."""

from __future__ import annotations

from litestar import Response, delete, get, patch, post
from litestar.params import FromPath, FromQuery

from gateway.http.asgi import Request
from gateway.routes.admin.common import (
    CHANGE,
    PAGED,
    READ,
    WRITE,
    actor,
    if_match,
    named,
    paged,
    tagged,
)
from gateway.routes.context import admin_of, asked, gateway_of, json_response
from tenants.admin.cursor import PAGES
from tenants.people.person import Person, PersonChange, PersonInvite, link_path
from tenants.people.roles import Role
from tenants.people.sessions import Session

ENDS = "Ends the person's sessions, in every gateway."
LINK = (
    "`link`, opened in a browser, sets the password: once, within a day. Without the setting"
    " `gateway.console_url` it is a path of this gateway."
)


async def _shown(
    request: Request, person: Person, token: str | None = None, status: int = 200
) -> Response[bytes]:
    """With the tenants' names, and the link of a new token."""
    where = gateway_of(request).deps.config.console_url
    link = {} if token is None else {"link": where + link_path(token)}
    return tagged(json_response(await named(request, person.as_json() | link), status), person.as_json())


@get("/admin/v1/people", opt=PAGED, summary="List people who may log in to the console", description=PAGES)
async def list_people(
    request: Request, cursor: FromQuery[str | None] = None, limit: FromQuery[int] = 100
) -> Response[bytes]:
    page = await admin_of(request).people.page(cursor=cursor, limit=limit)
    return await paged(request, page, Person.as_json)


@post(
    "/admin/v1/people",
    status_code=201,
    opt=WRITE | {"body": PersonInvite},
    summary="Invite a person",
    description=f"`role`: {', '.join(Role)}. A member names its `tenants`. {LINK}",
)
async def invite_person(request: Request) -> Response[bytes]:
    wanted = await asked(request, PersonInvite)
    made, token = await admin_of(request).people.invite(actor(request), wanted)
    return await _shown(request, made, token, 201)


@get("/admin/v1/people/{person:str}", opt=READ, summary="One person, by id or name")
async def show_person(request: Request, person: FromPath[str]) -> Response[bytes]:
    return await _shown(request, await admin_of(request).people.show(person))


@patch(
    "/admin/v1/people/{person:str}",
    opt=CHANGE | {"body": PersonChange},
    summary="Change a person's role, or a member's tenants",
    description=f"{ENDS} The last owner who can log in stays one.",
)
async def change_person(request: Request, person: FromPath[str]) -> Response[bytes]:
    wanted = await asked(request, PersonChange)
    changed = await admin_of(request).people.change(
        actor(request), person, wanted, if_match=if_match(request)
    )
    return await _shown(request, changed)


@post(
    "/admin/v1/people/{person:str}/suspend",
    status_code=200,
    opt=CHANGE,
    summary="Suspend a person",
    description=f"{ENDS} It cannot log in until it is resumed. The last owner who can log in stays.",
)
async def suspend_person(request: Request, person: FromPath[str]) -> Response[bytes]:
    changed = await admin_of(request).people.suspend(actor(request), person, if_match=if_match(request))
    return await _shown(request, changed)


@post(
    "/admin/v1/people/{person:str}/resume",
    status_code=200,
    opt=CHANGE,
    summary="Let a suspended person log in again",
)
async def resume_person(request: Request, person: FromPath[str]) -> Response[bytes]:
    changed = await admin_of(request).people.resume(actor(request), person, if_match=if_match(request))
    return await _shown(request, changed)


@post(
    "/admin/v1/people/{person:str}/reset",
    status_code=200,
    opt=CHANGE,
    summary="Take a person's password away",
    description=f"{ENDS} {LINK}",
)
async def reset_person(request: Request, person: FromPath[str]) -> Response[bytes]:
    changed, token = await admin_of(request).people.reset(actor(request), person, if_match=if_match(request))
    return await _shown(request, changed, token)


@delete(
    "/admin/v1/people/{person:str}",
    status_code=200,
    opt=CHANGE,
    summary="Erase a person",
    description="Removes the person, its sessions and links, and its name and addresses from the audit, whose"
    " rows and proofs stay as they are: they show `erased person`. Rows written before this version had the"
    " name in clear, and keep it. The last owner who can log in stays.",
)
async def erase_person(request: Request, person: FromPath[str]) -> Response[bytes]:
    erased = await admin_of(request).people.erase(actor(request), person, if_match=if_match(request))
    return json_response({"id": erased.person_id, "status": "erased"})


@delete(
    "/admin/v1/people/{person:str}/sessions",
    status_code=200,
    opt=CHANGE,
    summary="Log a person out everywhere",
)
async def end_sessions(request: Request, person: FromPath[str]) -> Response[bytes]:
    changed = await admin_of(request).people.end_sessions(actor(request), person, if_match=if_match(request))
    return await _shown(request, changed)


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


HANDLERS = [
    list_people,
    invite_person,
    show_person,
    change_person,
    suspend_person,
    resume_person,
    reset_person,
    erase_person,
    end_sessions,
    list_sessions,
    end_session,
]
