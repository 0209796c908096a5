"""Admin routes: projects."""

from __future__ import annotations

from litestar import Response, get, post
from litestar.params import FromPath, FromQuery

from gateway.http.asgi import Request
from gateway.routes.admin.common import (
    CHANGE,
    PAGED,
    PAGES,
    READ,
    WITHDRAW,
    WRITE,
    actor,
    changed,
    if_match,
    named,
    paged,
    tagged,
)
from gateway.routes.context import asked, asked_or_not, gateway_of, json_response
from tenants.admin.commands import ProjectCreate, Withdrawal
from tenants.admin.cursor import DEFAULT_PAGE
from tenants.directory.records import Project


@get("/admin/v1/projects", opt=PAGED, summary="List projects, of one tenant or of all", description=PAGES)
async def list_projects(
    request: Request,
    tenant: FromQuery[str | None] = None,
    cursor: FromQuery[str | None] = None,
    limit: FromQuery[int] = DEFAULT_PAGE,
) -> Response[bytes]:
    page = await gateway_of(request).deps.admin.page_projects(tenant, cursor=cursor, limit=limit)
    return await paged(request, page, Project.as_json)


@get(
    "/admin/v1/projects/{project:str}",
    opt=READ,
    summary="Show a project",
    description="`project` is its id, or with `tenant` its name.",
)
async def show_project(
    request: Request, project: FromPath[str], tenant: FromQuery[str | None] = None
) -> Response[bytes]:
    shown = await gateway_of(request).deps.admin.show_project(project, tenant)
    return tagged(json_response(await named(request, shown.as_json())), shown.as_json())


@post("/admin/v1/projects", status_code=201, opt=WRITE | {"body": ProjectCreate}, summary="Create a project")
async def create_project(request: Request) -> Response[bytes]:
    wanted = await asked(request, ProjectCreate)
    project = await gateway_of(request).deps.admin.create_project(actor(request), wanted)
    shown = await named(request, project.as_json())
    return await changed(request, shown, 201, stored=project.as_json())


@post(
    "/admin/v1/projects/{project:str}/suspend",
    status_code=200,
    opt=WITHDRAW,
    summary="Suspend a project",
    description="`project` is its id, or with `tenant` its name. Its keys are refused with 403"
    " `project_suspended`; waiting and running requests as of a tenant.",
)
async def suspend_project(
    request: Request, project: FromPath[str], tenant: FromQuery[str | None] = None
) -> Response[bytes]:
    wanted = await asked_or_not(request, Withdrawal)
    suspended = await gateway_of(request).deps.admin.suspend_project(
        actor(request), project, tenant, now=wanted.now, if_match=if_match(request)
    )
    shown = await named(request, suspended.as_json())
    return await changed(request, shown, stored=suspended.as_json())


@post(
    "/admin/v1/projects/{project:str}/resume",
    status_code=200,
    opt=CHANGE,
    summary="Undo a project's suspension",
    description="`project` is its id, or with `tenant` its name.",
)
async def resume_project(
    request: Request, project: FromPath[str], tenant: FromQuery[str | None] = None
) -> Response[bytes]:
    resumed = await gateway_of(request).deps.admin.resume_project(
        actor(request), project, tenant, if_match=if_match(request)
    )
    shown = await named(request, resumed.as_json())
    return await changed(request, shown, stored=resumed.as_json())


HANDLERS = [list_projects, show_project, create_project, suspend_project, resume_project]
