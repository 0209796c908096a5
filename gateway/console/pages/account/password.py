"""The page on which people change their own password."""

from __future__ import annotations

from litestar import Response

from gateway.console.access import form, page, visit_of
from gateway.console.form_errors import FORM_ERRORS, problem_of
from gateway.console.passwords import chosen_password
from gateway.console.rendering import page_response, signed_in
from gateway.http.asgi import Request, headers_of
from gateway.routes.context import gateway_of

PATH = "/console/password"
FIELDS = ("current", "password", "repeat")


@page(PATH)
async def password_page(request: Request) -> Response[str]:
    return page_response(
        "account/password.html", visit_of(request), is_changed="changed" in request.query_params
    )


@form(PATH)
async def change_password(request: Request) -> Response[str]:
    visit, deps, way_in = visit_of(request), gateway_of(request).deps, gateway_of(request).way_in
    person = visit.person
    try:
        await way_in.confirm(person, visit.form.get("current", ""), address=visit.address)
        new_hash = await chosen_password(way_in, person.name, visit.form)
        person = await deps.admin.people.set_password(visit.actor, person, new_hash)
    except FORM_ERRORS as error:
        problem = problem_of(error, fields=FIELDS, refused_at="current")
        return page_response("account/password.html", visit, problem=problem, is_changed=False)
    opened = await deps.people.open_session(
        person, address=visit.address, user_agent=headers_of(request.scope).get("user-agent", "")
    )
    return signed_in(visit, opened.cookie_value, f"{PATH}?changed")


HANDLERS = [password_page, change_password]
