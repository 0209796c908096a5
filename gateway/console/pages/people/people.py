"""The page of people, with invitations."""

from __future__ import annotations

from litestar import Response

from gateway.console.access import Visit, form, page, visit_of
from gateway.console.form_errors import FORM_ERRORS, FormProblem, problem_of
from gateway.console.forms import typed_fields
from gateway.console.names import ROLES, names_in, tenant_names
from gateway.console.rendering import page_response
from gateway.console.return_path import with_query
from gateway.http.asgi import Request, headers_of
from gateway.routes.context import gateway_of
from tenants.people.person import Person, PersonInvite, link_path
from tenants.people.roles import Act, Role
from tenants.resources.people import PEOPLE, PersonQuery
from tenants.resources.reading import read_page

PATH = "/console/people"
KEPT = ("name", "role", "tenants")
MOST_SHOWN = 100


def state_of(person: Person) -> str:
    return person.status if person.has_password or person.status != "active" else "invited"


@page(PATH, act=Act.READ_PEOPLE)
async def people_page(request: Request) -> Response[str]:
    return await _shown(request, typed_fields({}, *KEPT))


@form(f"{PATH}/invite", act=Act.CHANGE_PEOPLE)
async def invite(request: Request) -> Response[str]:
    visit, gateway = visit_of(request), gateway_of(request)
    typed = typed_fields(visit.form, *KEPT)
    try:
        await gateway.way_in.confirm(visit.person, visit.form.get("password", ""), address=visit.address)
        wanted = PersonInvite(
            name=visit.form.get("name", ""),
            role=typed["role"],
            tenants=names_in(visit.form.get("tenants", "")) or None,
        )
        person, token = await gateway.deps.admin.people.invite(visit.actor, wanted)
    except FORM_ERRORS as error:
        return await _shown(request, typed, problem_of(error, fields=(*KEPT, "password")))
    return link_response(request, visit, person, token)


def link_response(request: Request, visit: Visit, person: Person, token: str) -> Response[str]:
    where = gateway_of(request).deps.config.console_url
    if not where:
        where = f"{'https' if visit.is_https else 'http'}://{headers_of(request.scope).get('host', '')}"
    return page_response("people/link.html", visit, name=person.name, link=where + link_path(token))


async def _shown(
    request: Request, typed: dict[str, str], problem: FormProblem | None = None
) -> Response[str]:
    deps = gateway_of(request).deps
    cursor = request.query_params.get("cursor")
    page = await read_page(deps.admin, PEOPLE, PersonQuery(), cursor=cursor, limit=MOST_SHOWN)
    return page_response(
        "people/people.html",
        visit_of(request),
        problem=problem,
        people=[
            (person, ", ".join(tenant_names(deps.directory, person)), state_of(person))
            for person in page.rows
        ],
        next_page=with_query(PATH, {"cursor": page.next_cursor or ""}) if page.next_cursor else "",
        roles=ROLES,
        typed=typed | {"role": typed["role"] or Role.MEMBER.value},
    )


HANDLERS = [people_page, invite]
