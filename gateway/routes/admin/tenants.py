"""Admin routes: tenants, their projects and their keys."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from litestar import Response, delete, get, patch, post
from litestar.params import FromPath, FromQuery

from gateway.http.asgi import Request
from gateway.requests.schemas import KeyRotate
from gateway.routes.admin.common import (
    CHANGE,
    PAGED,
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
from gateway.routes.context import admin_of, asked, asked_or_not, json_response
from tenants.admin.commands import KeyChange, KeyCreate, ProjectCreate, TenantChange, TenantCreate, Withdrawal
from tenants.admin.cursor import DEFAULT_PAGE, PAGES
from tenants.directory.records import ApiKey, Project, Tenant


@get("/admin/v1/tenants", opt=PAGED, summary="List tenants, by name", description=PAGES)
async def list_tenants(
    request: Request, cursor: FromQuery[str | None] = None, limit: FromQuery[int] = DEFAULT_PAGE
) -> Response[bytes]:
    page = await admin_of(request).tenants.page(cursor=cursor, limit=limit)
    return await paged(request, page, Tenant.as_json)


@post("/admin/v1/tenants", status_code=201, opt=WRITE | {"body": TenantCreate}, summary="Create a tenant")
async def create_tenant(request: Request) -> Response[bytes]:
    wanted = await asked(request, TenantCreate)
    tenant = await admin_of(request).tenants.create(actor(request), wanted)
    return await changed(request, tenant.as_json(), 201, stored=tenant.as_json())


@get("/admin/v1/tenants/{tenant:str}", opt=READ, summary="Show a tenant")
async def show_tenant(request: Request, tenant: FromPath[str]) -> Response[bytes]:
    view = await admin_of(request).tenants.show(tenant)
    return tagged(json_response(await named(request, view.as_json())), view.tenant.as_json())


@patch(
    "/admin/v1/tenants/{tenant:str}",
    opt=CHANGE | {"body": TenantChange},
    summary="Change a tenant",
    description="What is not named stays as it is.",
)
async def change_tenant(request: Request, tenant: FromPath[str]) -> Response[bytes]:
    wanted, tenants = await asked(request, TenantChange), admin_of(request).tenants
    edited = await tenants.update(actor(request), tenant, wanted, if_match=if_match(request))
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
    suspended = await admin_of(request).tenants.suspend(
        actor(request), tenant, now=wanted.now, if_match=if_match(request)
    )
    return await changed(request, suspended.as_json(), stored=suspended.as_json())


@post("/admin/v1/tenants/{tenant:str}/resume", status_code=200, opt=CHANGE, summary="Undo a suspension")
async def resume_tenant(request: Request, tenant: FromPath[str]) -> Response[bytes]:
    resumed = await admin_of(request).tenants.resume(actor(request), tenant, if_match=if_match(request))
    return await changed(request, resumed.as_json(), stored=resumed.as_json())


@get("/admin/v1/projects", opt=PAGED, summary="List projects, of one tenant or of all", description=PAGES)
async def list_projects(
    request: Request,
    tenant: FromQuery[str | None] = None,
    cursor: FromQuery[str | None] = None,
    limit: FromQuery[int] = DEFAULT_PAGE,
) -> Response[bytes]:
    page = await admin_of(request).projects.page(tenant, cursor=cursor, limit=limit)
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
    shown = await admin_of(request).projects.show(project, tenant)
    return tagged(json_response(await named(request, shown.as_json())), shown.as_json())


@post("/admin/v1/projects", status_code=201, opt=WRITE | {"body": ProjectCreate}, summary="Create a project")
async def create_project(request: Request) -> Response[bytes]:
    wanted = await asked(request, ProjectCreate)
    project = await admin_of(request).projects.create(actor(request), wanted)
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
    suspended = await admin_of(request).projects.suspend(
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
    resumed = await admin_of(request).projects.resume(
        actor(request), project, tenant, if_match=if_match(request)
    )
    shown = await named(request, resumed.as_json())
    return await changed(request, shown, stored=resumed.as_json())


@get(
    "/admin/v1/keys",
    opt=PAGED,
    summary="List keys, of one tenant or of all, in order of creation",
    description=f"`last_used_at`: within a minute or so; null: never. {PAGES}",
)
async def list_keys(
    request: Request,
    tenant: FromQuery[str | None] = None,
    cursor: FromQuery[str | None] = None,
    limit: FromQuery[int] = DEFAULT_PAGE,
) -> Response[bytes]:
    page = await admin_of(request).keys.page(tenant, cursor=cursor, limit=limit)
    uses = await admin_of(request).keys.last_uses(page.rows)
    return await paged(request, page, lambda key: _shown(key, uses))


@get(
    "/admin/v1/keys/{key:str}",
    opt=READ,
    summary="Show a key, without its secret",
    description="`key` is its id or the visible prefix of its secret.",
)
async def show_key(request: Request, key: FromPath[str]) -> Response[bytes]:
    shown = await admin_of(request).keys.show(key)
    uses = await admin_of(request).keys.last_uses([shown])
    return tagged(json_response(await named(request, _shown(shown, uses))), shown.as_json())


def _shown(key: ApiKey, uses: Mapping[str, datetime]) -> dict[str, Any]:
    return key.as_json() | {
        "status": key.status(datetime.now(UTC)),
        "last_used_at": None if key.key_id not in uses else uses[key.key_id].isoformat(),
    }


@post(
    "/admin/v1/keys",
    status_code=201,
    opt=WRITE | {"body": KeyCreate},
    summary="Create a key",
    description="The answer's `key` is the secret, shown this once.",
)
async def create_key(request: Request) -> Response[bytes]:
    wanted = await asked(request, KeyCreate)
    key, secret = await admin_of(request).keys.create(actor(request), wanted)
    shown = await named(request, key.as_json() | {"key": secret})
    return await changed(request, shown, 201, stored=key.as_json())


@patch(
    "/admin/v1/keys/{key:str}",
    opt=CHANGE | {"body": KeyChange},
    summary="Change a key",
    description="What is not named stays as it is. In force from the next request on; a new end also counts"
    " for what waits.",
)
async def change_key(request: Request, key: FromPath[str]) -> Response[bytes]:
    wanted = await asked(request, KeyChange)
    edited = await admin_of(request).keys.update(actor(request), key, wanted, if_match=if_match(request))
    return await changed(request, await named(request, edited.as_json()), stored=edited.as_json())


@post(
    "/admin/v1/keys/{key:str}/rotate",
    status_code=200,
    opt=CHANGE | {"body": KeyRotate, "body_is_optional": True},
    summary="Give a key a new secret",
    description="Older secrets work `grace_s` longer.",
)
async def rotate_key(request: Request, key: FromPath[str]) -> Response[bytes]:
    wanted = await asked_or_not(request, KeyRotate)
    rotated, secret = await admin_of(request).keys.rotate(
        actor(request), key, wanted.grace_s, if_match=if_match(request)
    )
    shown = await named(request, rotated.as_json() | {"key": secret})
    return await changed(request, shown, stored=rotated.as_json())


@delete(
    "/admin/v1/keys/{key:str}",
    status_code=200,
    opt=WITHDRAW,
    summary="Revoke a key",
    description="For good. Waiting and running requests as of a suspended tenant.",
)
async def revoke_key(request: Request, key: FromPath[str]) -> Response[bytes]:
    wanted = await asked_or_not(request, Withdrawal)
    revoked = await admin_of(request).keys.revoke(
        actor(request), key, now=wanted.now, if_match=if_match(request)
    )
    return await changed(request, await named(request, revoked.as_json()), stored=revoked.as_json())


HANDLERS = [
    list_tenants,
    create_tenant,
    show_tenant,
    change_tenant,
    suspend_tenant,
    resume_tenant,
    list_projects,
    show_project,
    create_project,
    suspend_project,
    resume_project,
    list_keys,
    show_key,
    create_key,
    change_key,
    rotate_key,
    revoke_key,
]
