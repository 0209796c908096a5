"""The page behind a one-time link, on which the first owner and everyone invited choose a password."""

from __future__ import annotations

from litestar import Response

from gateway.console.access import Visit, form, page, visit_of
from gateway.console.form_errors import FORM_ERRORS, FormProblem, problem_of
from gateway.console.forms import MAX_SHOWN_CHARACTERS
from gateway.console.names import ROLES
from gateway.console.passwords import chosen_password
from gateway.console.rendering import page_response, signed_in
from gateway.console.return_path import START
from gateway.http.asgi import Request, headers_of
from gateway.routes.context import gateway_of
from tenants.errors import NotFound
from tenants.people.person import LINK_PATH, PersonLink

FIELDS = ("name", "password", "repeat")


@page(LINK_PATH, act=None)
async def set_up_page(request: Request) -> Response[str]:
    token = request.query_params.get("token", "")[:MAX_SHOWN_CHARACTERS]
    link = await gateway_of(request).deps.people.link(token) if token else None
    visit = visit_of(request)
    return _shown(visit, link, token, "") if link is not None else _dead(visit)


@form(LINK_PATH, act=None)
async def set_up(request: Request) -> Response[str]:
    """Stores the password and logs the person in; the link is used up."""
    visit, deps = visit_of(request), gateway_of(request).deps
    token = visit.form.get("token", "")
    # Before any hashing: a token that is none costs nothing.
    link = await deps.people.link(token) if token else None
    if link is None:
        return _dead(visit)
    name = visit.form.get("name", "") if link.is_set_up else link.name or ""
    try:
        new_hash = await chosen_password(gateway_of(request).way_in, name, visit.form)
        person = await deps.admin.people.redeem_link(
            visit.stranger, token, new_hash, name if link.is_set_up else None
        )
    except NotFound:
        return _dead(visit)  # used in the meantime
    except FORM_ERRORS as error:
        return _shown(visit, link, token, name, problem_of(error, fields=FIELDS))
    if visit.session is not None:
        await deps.people.log_out(visit.session)
    opened = await deps.people.open_session(
        person, address=visit.address, user_agent=headers_of(request.scope).get("user-agent", "")
    )
    return signed_in(visit, opened.cookie_value, START)


def _shown(
    visit: Visit, link: PersonLink, token: str, name: str, problem: FormProblem | None = None
) -> Response[str]:
    return page_response(
        "account/set_up.html",
        visit,
        problem=problem,
        is_set_up=link.is_set_up,
        role=ROLES[link.role],
        link_token=token,
        name=name[:MAX_SHOWN_CHARACTERS] if link.is_set_up else link.name,
    )


def _dead(visit: Visit) -> Response[str]:
    return page_response("account/dead_link.html", visit, status=404)


HANDLERS = [set_up_page, set_up]
