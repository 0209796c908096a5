"""The page of a tenant's projects, and a new one."""

from __future__ import annotations

from litestar import Response
from litestar.params import FromPath

from gateway.console.access import form, page, tenant_shown, visit_of
from gateway.console.form_errors import FORM_ERRORS, FormProblem, problem_of
from gateway.console.forms import typed_fields
from gateway.console.pages.tenant_parts.acts import done, said
from gateway.console.pages.tenants import tenant as one
from gateway.console.pages.tenants.tenants import PATH as LIST
from gateway.console.rendering import page_response
from gateway.console.return_path import with_query
from gateway.http.asgi import Request
from gateway.routes.context import admin_of
from tenants.nouns.project import ProjectCreate
from tenants.nouns.tenant import Tenant
from tenants.people.roles import Act
from tenants.resources.projects import PROJECTS, ProjectQuery
from tenants.resources.reading import read_page

PATH = f"{one.PATH}/projects"
MOST_SHOWN = 100
DONE = {
    "made": "The project is made.",
    "suspended": "The project is suspended: its keys are refused.",
    "resumed": "The project's keys work again.",
}


@page(PATH, act=Act.READ_TENANT)
async def projects_page(request: Request, tenant: FromPath[str]) -> Response[str]:
    return await _shown(request, await tenant_shown(request, tenant), {"name": ""})


@form(PATH, act=Act.CHANGE_TENANT)
async def new_project(request: Request, tenant: FromPath[str]) -> Response[str]:
    visit, owner = visit_of(request), await tenant_shown(request, tenant, Act.CHANGE_TENANT)
    wanted = ProjectCreate(tenant=owner.tenant_id, name=visit.form.get("name", ""))
    try:
        await admin_of(request).projects.create(visit.actor, wanted)
    except FORM_ERRORS as error:
        problem = problem_of(error, fields=("name",))
        return await _shown(request, owner, typed_fields(visit.form, "name"), problem)
    return await done(request, f"{LIST}/{owner.name}/projects", "made")


async def _shown(
    request: Request, found: Tenant, typed: dict[str, str], problem: FormProblem | None = None
) -> Response[str]:
    visit, here = visit_of(request), f"{LIST}/{found.name}/projects"
    query, cursor = ProjectQuery(tenant=found.tenant_id), request.query_params.get("cursor")
    listed = await read_page(admin_of(request), PROJECTS, query, cursor=cursor, limit=MOST_SHOWN)
    return page_response(
        "tenants/projects.html",
        visit,
        problem=problem,
        done=said(request, DONE),
        found=found,
        projects=listed.rows,
        next_page=with_query(here, {"cursor": listed.next_cursor or ""}) if listed.next_cursor else "",
        may_change=visit.person.may(Act.CHANGE_TENANT, found.tenant_id),
        typed=typed,
    )


HANDLERS = [projects_page, new_project]
