"""Admin routes: tenants."""

from __future__ import annotations

from litestar import Response, get, patch, post
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
from tenants.admin.commands import TenantChange, TenantCreate, Withdrawal
from tenants.admin.cursor import DEFAULT_PAGE
from tenants.directory.records import Tenant


@get("/admin/v1/tenants", opt=PAGED, summary="List tenants, by name", description=PAGES)
async def list_tenants(
    request: Request, cursor: FromQuery[str | None] = None, limit: FromQuery[int] = DEFAULT_PAGE
) -> Response[bytes]:
    page = await gateway_of(request).deps.admin.page_tenants(cursor=cursor, limit=limit)
    return await paged(request, page, Tenant.as_json)


@post("/admin/v1/tenants", status_code=201, opt=WRITE | {"body": TenantCreate}, summary="Create a tenant")
async def create_tenant(request: Request) -> Response[bytes]:
    wanted = await asked(request, TenantCreate)
    tenant = await gateway_of(request).deps.admin.create_tenant(actor(request), wanted)
    return await changed(request, tenant.as_json(), 201, stored=tenant.as_json())


@get("/admin/v1/tenants/{tenant:str}", opt=READ, summary="Show a tenant")
async def show_tenant(request: Request, tenant: FromPath[str]) -> Response[bytes]:
    view = await gateway_of(request).deps.admin.show_tenant(tenant)
    return tagged(json_response(await named(request, view.as_json())), view.tenant.as_json())


@patch(
    "/admin/v1/tenants/{tenant:str}",
    opt=CHANGE | {"body": TenantChange},
    summary="Change a tenant",
    description="What is not named stays as it is.",
)
async def change_tenant(request: Request, tenant: FromPath[str]) -> Response[bytes]:
    wanted = await asked(request, TenantChange)
    edited = await gateway_of(request).deps.admin.update_tenant(
        actor(request), tenant, wanted, if_match=if_match(request)
    )
    return await changed(request, edited.as_json(), stored=edited.as_json())


@post(
    "/admin/v1/tenants/{tenant:str}/suspend",
    status_code=200,
    opt=WITHDRAW,
    summary="Suspend a tenant",
    description="Its keys are refused with 403 `tenant_suspended`, and its waiting requests end with 401 and"
    " are refunded. Running ones go on to their end, or with `now` end as well, charged for what they"
    " emitted.",
)
async def suspend_tenant(request: Request, tenant: FromPath[str]) -> Response[bytes]:
    wanted = await asked_or_not(request, Withdrawal)
    suspended = await gateway_of(request).deps.admin.suspend_tenant(
        actor(request), tenant, now=wanted.now, if_match=if_match(request)
    )
    return await changed(request, suspended.as_json(), stored=suspended.as_json())


@post("/admin/v1/tenants/{tenant:str}/resume", status_code=200, opt=CHANGE, summary="Undo a suspension")
async def resume_tenant(request: Request, tenant: FromPath[str]) -> Response[bytes]:
    resumed = await gateway_of(request).deps.admin.resume_tenant(
        actor(request), tenant, if_match=if_match(request)
    )
    return await changed(request, resumed.as_json(), stored=resumed.as_json())


HANDLERS = [list_tenants, create_tenant, show_tenant, change_tenant, suspend_tenant, resume_tenant]
