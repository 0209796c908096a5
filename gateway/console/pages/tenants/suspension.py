"""Suspends and resumes a tenant or a project, after a confirmation."""

from __future__ import annotations

from litestar import Response
from litestar.params import FromPath

from gateway.console.access import form, page, tenant_shown, visit_of
from gateway.console.pages.tenant_parts.acts import Unfinished, done, in_flight
from gateway.console.pages.tenants import tenant as one
from gateway.console.pages.tenants.tenants import PATH as LIST
from gateway.console.rendering import confirm_page
from gateway.http.asgi import Request
from gateway.routes.context import admin_of
from tenants.people.roles import Act

OF_TENANT = one.PATH
OF_PROJECT = f"{one.PATH}/projects/{{project:str}}"


def effects(what: str, code: str, live: Unfinished, *, now: bool) -> list[str]:
    running = (
        "What runs ends now as well, charged for what it emitted." if now else "What runs goes on to its end."
    )
    return [
        f"All keys of {what} are refused from then on, in every gateway, with 403 {code}.",
        f"Now there are {live.words} requests. What waits ends with 401, and its budget is given back.",
        running,
        "It can be undone: then the same keys work again.",
    ]


@page(f"{OF_TENANT}/suspend", act=Act.CHANGE_TENANT)
async def ask_tenant(request: Request, tenant: FromPath[str]) -> Response[str]:
    """`now` in the address: running requests end, too."""
    owner = await tenant_shown(request, tenant, Act.CHANGE_TENANT)
    now = request.query_params.get("now") == "yes"
    live = await in_flight(request, owner.tenant_id)
    return confirm_page(
        visit_of(request),
        title=f"Suspend {owner.name}" + (" and end what runs?" if now else "?"),
        effects=effects(f"the tenant {owner.name}", "tenant_suspended", live, now=now),
        action=f"{LIST}/{owner.name}/suspend",
        button="Suspend it",
        back=f"{LIST}/{owner.name}",
        hidden={"now": "yes"} if now else {},
    )


@form(f"{OF_TENANT}/suspend", act=Act.CHANGE_TENANT)
async def suspend_tenant(request: Request, tenant: FromPath[str]) -> Response[str]:
    visit, owner = visit_of(request), await tenant_shown(request, tenant, Act.CHANGE_TENANT)
    now = visit.form.get("now") == "yes"
    await admin_of(request).tenants.suspend(visit.actor, owner.tenant_id, now=now)
    return await done(request, f"{LIST}/{owner.name}", "suspended")


@form(f"{OF_TENANT}/resume", act=Act.CHANGE_TENANT)
async def resume_tenant(request: Request, tenant: FromPath[str]) -> Response[str]:
    visit, owner = visit_of(request), await tenant_shown(request, tenant, Act.CHANGE_TENANT)
    await admin_of(request).tenants.resume(visit.actor, owner.tenant_id)
    return await done(request, f"{LIST}/{owner.name}", "resumed")


@page(f"{OF_PROJECT}/suspend", act=Act.CHANGE_TENANT)
async def ask_project(request: Request, tenant: FromPath[str], project: FromPath[str]) -> Response[str]:
    owner = await tenant_shown(request, tenant, Act.CHANGE_TENANT)
    shown = await admin_of(request).projects.show(project, owner.tenant_id)
    now = request.query_params.get("now") == "yes"
    live = await in_flight(request, owner.tenant_id, project=shown.project_id)
    return confirm_page(
        visit_of(request),
        title=f"Suspend the project {shown.name} of {owner.name}" + (" and end what runs?" if now else "?"),
        effects=effects(f"the project {shown.name}", "project_suspended", live, now=now),
        action=f"{LIST}/{owner.name}/projects/{shown.project_id}/suspend",
        button="Suspend it",
        back=f"{LIST}/{owner.name}/projects",
        hidden={"now": "yes"} if now else {},
    )


@form(f"{OF_PROJECT}/suspend", act=Act.CHANGE_TENANT)
async def suspend_project(request: Request, tenant: FromPath[str], project: FromPath[str]) -> Response[str]:
    visit, owner = visit_of(request), await tenant_shown(request, tenant, Act.CHANGE_TENANT)
    now = visit.form.get("now") == "yes"
    await admin_of(request).projects.suspend(visit.actor, project, owner.tenant_id, now=now)
    return await done(request, f"{LIST}/{owner.name}/projects", "suspended")


@form(f"{OF_PROJECT}/resume", act=Act.CHANGE_TENANT)
async def resume_project(request: Request, tenant: FromPath[str], project: FromPath[str]) -> Response[str]:
    visit, owner = visit_of(request), await tenant_shown(request, tenant, Act.CHANGE_TENANT)
    await admin_of(request).projects.resume(visit.actor, project, owner.tenant_id)
    return await done(request, f"{LIST}/{owner.name}/projects", "resumed")


HANDLERS = [ask_tenant, suspend_tenant, resume_tenant, ask_project, suspend_project, resume_project]
