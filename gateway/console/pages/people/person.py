"""The page of one person: role, suspension, a new link, sessions."""

from __future__ import annotations

from collections.abc import Mapping

from litestar import Response
from litestar.params import FromPath

from gateway.console.access import form, page, visit_of
from gateway.console.form_errors import FORM_ERRORS, WHOLE_FORM, FormProblem, problem_of
from gateway.console.forms import typed_fields
from gateway.console.names import ROLES, names_in, tenant_names
from gateway.console.pages.account import sessions
from gateway.console.pages.people import people
from gateway.console.rendering import page_response, redirect
from gateway.console.return_path import with_query
from gateway.http.asgi import Request
from gateway.routes.context import admin_of, gateway_of
from tenants.admin.transaction import etag_of
from tenants.errors import Invalid, PreconditionFailed
from tenants.people.person import Person, PersonChange
from tenants.people.roles import Act

PATH = f"{people.PATH}/{{person:str}}"
DONE = {
    "unchanged": "Role and tenants were so already: nothing was changed, and no session has ended.",
    "role": "Role and tenants are changed, and all sessions of this person have ended.",
    "suspend": "This person is suspended, and all sessions have ended.",
    "resume": "This person may log in again.",
    "end_sessions": "All sessions of this person have ended.",
    "end_session": "The session has ended.",
}
SESSION_PASSWORD = "session_password"
"""The field of the owner's password in the form of sessions."""
STALE = FormProblem(
    412, {WHOLE_FORM: "This person was changed after you opened the page. Nothing was done; look again."}
)


@page(PATH, act=Act.READ_PEOPLE)
async def person_page(request: Request, person: FromPath[str]) -> Response[str]:
    shown = await admin_of(request).people.show(person)
    done = DONE.get(request.query_params.get("done", ""), "")
    return await _shown(request, shown, done=done)


@form(PATH, act=Act.CHANGE_PEOPLE)
async def change_person(request: Request, person: FromPath[str]) -> Response[str]:
    """Does what the pressed button says; asks for the password."""
    visit, gateway = visit_of(request), gateway_of(request)
    deps = gateway.deps
    shown = await deps.admin.people.show(person)
    act = visit.form.get("act", "")
    asked_in = SESSION_PASSWORD if act == "end_session" else "password"
    try:
        await gateway.way_in.confirm(visit.person, visit.form.get(asked_in, ""), address=visit.address)
        match act:
            case "role":
                wanted = PersonChange(
                    role=visit.form.get("role", ""), tenants=names_in(visit.form.get("tenants", ""))
                )
                seen = visit.form.get("etag")
                condition = None if seen is None else frozenset({seen})
                changed = await deps.admin.people.change(visit.actor, person, wanted, if_match=condition)
                act = "role" if changed.revision != shown.revision else "unchanged"
            case "suspend":
                await deps.admin.people.suspend(visit.actor, person)
            case "resume":
                await deps.admin.people.resume(visit.actor, person)
            case "reset":
                changed, token = await deps.admin.people.reset(visit.actor, person)
                return people.link_response(request, visit, changed, token)
            case "end_sessions":
                await deps.admin.people.end_sessions(visit.actor, person)
            case "end_session":
                session = visit.form.get("session", "")
                await deps.admin.person_sessions.end(visit.actor, session, of=shown.person_id)
            case _:
                raise Invalid("act", "there is no such button")
    except PreconditionFailed:
        return await _shown(request, await deps.admin.people.show(person), problem=STALE)
    except FORM_ERRORS as error:
        problem = problem_of(error, fields=("role", "tenants"), refused_at=asked_in)
        return await _shown(request, shown, problem=problem)
    return redirect(with_query(f"{people.PATH}/{shown.person_id}", {"done": act}))


async def _shown(
    request: Request, found: Person, *, problem: FormProblem | None = None, done: str = ""
) -> Response[str]:
    visit, deps = visit_of(request), gateway_of(request).deps
    assert visit.session is not None
    seen = etag_of(found.as_json())
    is_kept = problem is not None and problem is not STALE
    stored = {"role": found.role.value, "tenants": ", ".join(tenant_names(deps.directory, found))}
    return page_response(
        "people/person.html",
        visit,
        problem=problem,
        done=done,
        found=found,
        state=people.state_of(found),
        sessions=sessions.newest_first(await deps.people.sessions_of(found)),
        this_id=visit.session.session_id,
        roles=ROLES,
        typed=stored | (_typed(visit.form) if is_kept else {}),
        etag=visit.form.get("etag", seen) if is_kept else seen,
        stored=stored,
    )


def _typed(form: Mapping[str, str]) -> dict[str, str]:
    return typed_fields(form, *(name for name in ("role", "tenants") if name in form))


HANDLERS = [person_page, change_person]
