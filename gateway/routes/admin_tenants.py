"""Admin routes: status, policy, tenants, projects and keys.

Every change goes through `tenants.admin.admin`, which also writes the audit row. A change is in force in
this gateway before it is answered.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from litestar import Request, Response, delete, get, patch, post
from litestar.params import FromPath, FromQuery

from engine.scheduling.policy import UnknownPolicy
from gateway import errors
from gateway.requests.schemas import KeyRotate, PolicyChange
from gateway.routes import audit, brakes, limits, prices, slo
from gateway.routes.admin_common import READ, WRITE, actor, asked, changed, listed, named
from gateway.routes.context import gateway_of, json_response
from gateway.routes.views.policy_view import MAX_DECISIONS, MAX_STEPS, change_policy, policy_of, tenant_names
from gateway.routes.views.status_view import forecasts_of, status_of
from tenants.admin.commands import KeyChange, KeyCreate, ProjectCreate, TenantChange, TenantCreate
from tenants.ledger.verify import verify_ledger

MAX_LOG_PAGE = 5_000


@get(
    "/admin/v1/status",
    opt=READ,
    summary="Queue, tenants, engines and refusals, now",
    description="Each tenant's `tiers`: what waits and runs, its part of the tier's service of about the last"
    " minute (`share`) against the weighted max-min one (`fair_share`), and of its last requests the waits"
    " that they were told and had. `active`: only tenants with something of that, without their limits.",
)
async def status(request: Request[Any, Any, Any], active: FromQuery[bool] = False) -> Response[bytes]:
    return json_response(await status_of(gateway_of(request), active_only=active))


@get(
    "/admin/v1/dispatch-log",
    opt=READ,
    summary="The flow controller's events",
    description="Arrivals, dispatches (with the counters of everybody who waited), corrections of charges by"
    " the length that an engine foresees, and settlements from index `since` on, at most `limit`."
    " `first_index` is the oldest that is kept; `tenants` has names by id.",
)
async def dispatch_log(
    request: Request[Any, Any, Any], since: FromQuery[int] = 0, limit: FromQuery[int] = 1000
) -> Response[bytes]:
    if since < 0:
        raise errors.bad_request(f"Invalid 'since': {since} is less than 0.", "since")
    if not 1 <= limit <= MAX_LOG_PAGE:
        raise errors.bad_request(
            f"Invalid 'limit': {limit} must be at least 1 and at most {MAX_LOG_PAGE}.", "limit"
        )
    log = gateway_of(request).flow.log
    records = list(log.since(since, limit))
    next_index = max(since, log.first_index) + len(records)
    return json_response(
        {
            "first_index": log.first_index,
            "next_index": next_index,
            "records": records,
            "tenants": tenant_names(gateway_of(request), (each.tenant_id for each in records)),
        }
    )


@get(
    "/admin/v1/forecasts",
    opt=READ,
    summary="How good the forecasts are",
    description="Of output lengths: each layer of the gateway, by model, and the length probe of each engine"
    " against what was predicted on arrival; and the engines' step times.",
)
async def forecasts(request: Request[Any, Any, Any]) -> Response[bytes]:
    return json_response(forecasts_of(gateway_of(request)))


@post("/admin/v1/ledger/verify", status_code=200, opt=READ, summary="Do ledger and counters agree?")
async def ledger_verify(request: Request[Any, Any, Any]) -> Response[bytes]:
    gateway = gateway_of(request)
    report = await verify_ledger(
        gateway.deps.database,
        gateway.deps.quota_store,
        running=lambda: gateway.holds.live,
        gateway_id=gateway.deps.gateway_id,
        stale_s=gateway.deps.config.gateway_stale_s,
    )
    return json_response(report.as_json())


@get(
    "/admin/v1/policy",
    opt=READ,
    summary="The scheduling policy in force, and the last decisions",
    description="For every admission and eviction: the rule, the rank in the order, and who was displaced."
    " With `steps`: the tokens of as many of the last steps, by tenant; `tenants` has their names by id.",
)
async def policy(
    request: Request[Any, Any, Any], decisions: FromQuery[int] = 20, steps: FromQuery[int] = 0
) -> Response[bytes]:
    if not 0 <= decisions <= MAX_DECISIONS:
        raise errors.bad_request(
            f"Invalid 'decisions': {decisions} must be at least 0 and at most {MAX_DECISIONS}.", "decisions"
        )
    if not 0 <= steps <= MAX_STEPS:
        raise errors.bad_request(
            f"Invalid 'steps': {steps} must be at least 0 and at most {MAX_STEPS}.", "steps"
        )
    return json_response(await policy_of(gateway_of(request), decisions, steps))


@post(
    "/admin/v1/policy",
    status_code=200,
    opt=WRITE | {"body": PolicyChange},
    summary="Change the scheduling policy",
    description="Takes effect with the next step, in all gateways of the database; nothing that runs or waits"
    " is lost. It is kept, and goes before the settings, until `from_settings` gives it up.",
)
async def set_policy(request: Request[Any, Any, Any]) -> Response[bytes]:
    wanted = await asked(request, PolicyChange)
    gateway = gateway_of(request)
    if not wanted.policy and not wanted.from_settings:
        raise errors.bad_request(
            "Missing required parameter: 'policy'. Name one (GET /admin/v1/policy lists them), or send"
            " 'from_settings': true.",
            "policy",
            code="missing_required_parameter",
        )
    try:
        await change_policy(gateway, actor(request), wanted)
    except UnknownPolicy as error:
        raise errors.bad_request(f"Invalid 'policy': {error}.", "policy") from None
    except ValueError as error:
        raise errors.bad_request(f"Invalid 'options': {error}.", "options") from None
    return await changed(request, await policy_of(gateway, 0))


# ---------------------------------------------------------------- tenants


@get("/admin/v1/tenants", opt=READ, summary="List tenants")
async def list_tenants(request: Request[Any, Any, Any]) -> Response[bytes]:
    tenants = await gateway_of(request).deps.admin.list_tenants()
    return json_response({"object": "list", "data": [each.as_json() for each in tenants]})


@post("/admin/v1/tenants", status_code=201, opt=WRITE | {"body": TenantCreate}, summary="Create a tenant")
async def create_tenant(request: Request[Any, Any, Any]) -> Response[bytes]:
    wanted = await asked(request, TenantCreate)
    tenant = await gateway_of(request).deps.admin.create_tenant(actor(request), wanted)
    return await changed(request, tenant.as_json(), 201)


@get("/admin/v1/tenants/{tenant:str}", opt=READ, summary="Show a tenant")
async def show_tenant(request: Request[Any, Any, Any], tenant: FromPath[str]) -> Response[bytes]:
    view = await gateway_of(request).deps.admin.show_tenant(tenant)
    return json_response(await named(request, view.as_json()))


@patch(
    "/admin/v1/tenants/{tenant:str}",
    opt=WRITE | {"body": TenantChange},
    summary="Change a tenant",
    description="What is not named stays as it is.",
)
async def change_tenant(request: Request[Any, Any, Any], tenant: FromPath[str]) -> Response[bytes]:
    wanted = await asked(request, TenantChange)
    edited = await gateway_of(request).deps.admin.update_tenant(actor(request), tenant, wanted)
    return await changed(request, edited.as_json())


@post("/admin/v1/tenants/{tenant:str}/suspend", status_code=200, opt=WRITE, summary="Suspend a tenant")
async def suspend_tenant(request: Request[Any, Any, Any], tenant: FromPath[str]) -> Response[bytes]:
    suspended = await gateway_of(request).deps.admin.suspend_tenant(actor(request), tenant)
    return await changed(request, suspended.as_json())


@post("/admin/v1/tenants/{tenant:str}/resume", status_code=200, opt=WRITE, summary="Undo a suspension")
async def resume_tenant(request: Request[Any, Any, Any], tenant: FromPath[str]) -> Response[bytes]:
    resumed = await gateway_of(request).deps.admin.resume_tenant(actor(request), tenant)
    return await changed(request, resumed.as_json())


# ---------------------------------------------------------------- projects


@get("/admin/v1/projects", opt=READ, summary="List projects, of one tenant or of all")
async def list_projects(
    request: Request[Any, Any, Any], tenant: FromQuery[str | None] = None
) -> Response[bytes]:
    projects = await gateway_of(request).deps.admin.list_projects(tenant)
    return await listed(request, (each.as_json() for each in projects))


@post("/admin/v1/projects", status_code=201, opt=WRITE | {"body": ProjectCreate}, summary="Create a project")
async def create_project(request: Request[Any, Any, Any]) -> Response[bytes]:
    wanted = await asked(request, ProjectCreate)
    project = await gateway_of(request).deps.admin.create_project(actor(request), wanted)
    return await changed(request, await named(request, project.as_json()), 201)


@post(
    "/admin/v1/projects/{project:str}/suspend",
    status_code=200,
    opt=WRITE,
    summary="Suspend a project",
    description="`project` is its id, or with `tenant` its name. Its keys are refused with 403"
    " `project_suspended` within a second, at every gateway; running requests go on to their end.",
)
async def suspend_project(
    request: Request[Any, Any, Any], project: FromPath[str], tenant: FromQuery[str | None] = None
) -> Response[bytes]:
    suspended = await gateway_of(request).deps.admin.suspend_project(actor(request), project, tenant)
    return await changed(request, await named(request, suspended.as_json()))


@post(
    "/admin/v1/projects/{project:str}/resume",
    status_code=200,
    opt=WRITE,
    summary="Undo a project's suspension",
    description="`project` is its id, or with `tenant` its name.",
)
async def resume_project(
    request: Request[Any, Any, Any], project: FromPath[str], tenant: FromQuery[str | None] = None
) -> Response[bytes]:
    resumed = await gateway_of(request).deps.admin.resume_project(actor(request), project, tenant)
    return await changed(request, await named(request, resumed.as_json()))


# ---------------------------------------------------------------- keys


@get("/admin/v1/keys", opt=READ, summary="List keys, of one tenant or of all")
async def list_keys(request: Request[Any, Any, Any], tenant: FromQuery[str | None] = None) -> Response[bytes]:
    keys = await gateway_of(request).deps.admin.list_keys(tenant)
    now = datetime.now(UTC)
    return await listed(request, (each.as_json() | {"status": each.status(now)} for each in keys))


@post(
    "/admin/v1/keys",
    status_code=201,
    opt=WRITE | {"body": KeyCreate},
    summary="Create a key",
    description="The answer's `key` is the secret, shown this once.",
)
async def create_key(request: Request[Any, Any, Any]) -> Response[bytes]:
    wanted = await asked(request, KeyCreate)
    key, secret = await gateway_of(request).deps.admin.create_key(actor(request), wanted)
    return await changed(request, await named(request, key.as_json() | {"key": secret}), 201)


@patch(
    "/admin/v1/keys/{key:str}",
    opt=WRITE | {"body": KeyChange},
    summary="Change a key",
    description="What is not named stays as it is.",
)
async def change_key(request: Request[Any, Any, Any], key: FromPath[str]) -> Response[bytes]:
    wanted = await asked(request, KeyChange)
    edited = await gateway_of(request).deps.admin.update_key(actor(request), key, wanted)
    return await changed(request, await named(request, edited.as_json()))


@post(
    "/admin/v1/keys/{key:str}/rotate",
    status_code=200,
    opt=WRITE | {"body": KeyRotate},
    summary="Give a key a new secret",
    description="Older secrets work `grace_s` longer.",
)
async def rotate_key(request: Request[Any, Any, Any], key: FromPath[str]) -> Response[bytes]:
    wanted = await asked(request, KeyRotate)
    rotated, secret = await gateway_of(request).deps.admin.rotate_key(actor(request), key, wanted.grace_s)
    return await changed(request, await named(request, rotated.as_json() | {"key": secret}))


@delete("/admin/v1/keys/{key:str}", status_code=200, opt=WRITE, summary="Revoke a key")
async def revoke_key(request: Request[Any, Any, Any], key: FromPath[str]) -> Response[bytes]:
    revoked = await gateway_of(request).deps.admin.revoke_key(actor(request), key)
    return await changed(request, await named(request, revoked.as_json()))


HANDLERS = [
    status,
    dispatch_log,
    forecasts,
    ledger_verify,
    policy,
    set_policy,
    list_tenants,
    create_tenant,
    show_tenant,
    change_tenant,
    suspend_tenant,
    resume_tenant,
    list_projects,
    create_project,
    suspend_project,
    resume_project,
    list_keys,
    create_key,
    change_key,
    rotate_key,
    revoke_key,
    *audit.HANDLERS,
    *brakes.HANDLERS,
    *limits.HANDLERS,
    *prices.HANDLERS,
    *slo.HANDLERS,
]
