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


def _asked(request: Request, title: str, what: str, here: str, back: str, live: Unfinished) -> Response[str]:
    """`now` in the address: running requests end, too."""
    now, code = request.query_params.get("now") == "yes", f"{what.split()[1]}_suspended"
    running = "ends now as well, charged for what it emitted" if now else "goes on to its end"
    return confirm_page(
        visit_of(request),
        title=f"Suspend {title}" + (" and end what runs?" if now else "?"),
        effects=[
            f"All keys of {what} are refused from then on, in every gateway, with 403 {code}.",
            f"Now there are {live.words} requests. What waits ends with 401, and its budget is given back.",
            f"What runs {running}.",
            "It can be undone: then the same keys work again.",
        ],
        action=f"{here}/suspend",
        button="Suspend it",
        back=back,
        hidden={"now": "yes"} if now else {},
    )


@page(f"{OF_TENANT}/suspend", act=Act.CHANGE_TENANT)
async def ask_tenant(request: Request, tenant: FromPath[str]) -> Response[str]:
    owner = await tenant_shown(request, tenant, Act.CHANGE_TENANT)
    live, here = await in_flight(request, owner.tenant_id), f"{LIST}/{owner.name}"
    return _asked(request, owner.name, f"the tenant {owner.name}", here, here, live)


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
    live = await in_flight(request, owner.tenant_id, project=shown.project_id)
    what, back = f"the project {shown.name}", f"{LIST}/{owner.name}/projects"
    return _asked(request, f"{what} of {owner.name}", what, f"{back}/{shown.project_id}", back, live)


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
