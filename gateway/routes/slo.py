"""Admin routes of targets: set, list, remove, report, misses."""

from __future__ import annotations

from typing import Any

from litestar import Request, Response, delete, get, post
from litestar.params import FromPath, FromQuery

from gateway.explain.attribution import Cause
from gateway.routes.admin_common import READ, WRITE, actor, asked, changed, listed, named
from gateway.routes.context import gateway_of, json_response
from tenants.admin.commands import SloSet
from tenants.slo.slo import METRICS, PERIOD_DAYS


@get("/admin/v1/slos", opt=READ, summary="List targets, all of them or those that bind one tenant")
async def list_slos(request: Request[Any, Any, Any], tenant: FromQuery[str | None] = None) -> Response[bytes]:
    found = await gateway_of(request).deps.admin.list_slos(tenant)
    return await listed(request, (each.as_json() for each in found))


@post(
    "/admin/v1/slos",
    status_code=201,
    opt=WRITE | {"body": SloSet},
    summary="Set a target",
    description="Of a tier, or of one tenant in a tier, whose own target then counts instead. The same"
    f" tenant, tier and metric are replaced; what was counted stays. `metric`: {', '.join(METRICS)}.",
)
async def set_slo(request: Request[Any, Any, Any]) -> Response[bytes]:
    wanted = await asked(request, SloSet)
    gateway = gateway_of(request)
    slo = await gateway.deps.admin.set_slo(actor(request), wanted)
    answer = await changed(request, await named(request, slo.as_json()), 201)
    await gateway.slo.refresh()
    return answer


@delete("/admin/v1/slos/{slo:str}", status_code=200, opt=WRITE, summary="Remove a target")
async def remove_slo(request: Request[Any, Any, Any], slo: FromPath[str]) -> Response[bytes]:
    gateway = gateway_of(request)
    removed = await gateway.deps.admin.remove_slo(actor(request), slo)
    answer = await changed(request, await named(request, removed.as_json()))
    await gateway.slo.refresh()
    return answer


@get(
    "/admin/v1/slo/report",
    opt=READ,
    summary="How targets were met: attainment, error budgets, burn rates, causes",
    description=f"Over {PERIOD_DAYS} days, by tenant, tier and metric. `burn`: rates over a long and a short "
    "window; both at `fires_at` or above is an alert. `causes` counts misses.",
)
async def slo_report(
    request: Request[Any, Any, Any],
    tenant: FromQuery[str | None] = None,
    tier: FromQuery[str | None] = None,
) -> Response[bytes]:
    reports = await gateway_of(request).deps.admin.slo_report(tenant, tier)
    return json_response({"object": "list", "data": [each.as_json() for each in reports]})


@get(
    "/admin/v1/slo/misses",
    opt=READ,
    summary="Missed targets, the newest first, with their cause and its evidence",
    description=f"`cause`: {', '.join(Cause)}.",
)
async def slo_misses(
    request: Request[Any, Any, Any],
    tenant: FromQuery[str | None] = None,
    tier: FromQuery[str | None] = None,
    cause: FromQuery[str | None] = None,
    limit: FromQuery[int] = 100,
) -> Response[bytes]:
    found = await gateway_of(request).deps.admin.list_misses(
        tenant=tenant, tier=tier, cause=cause, most=limit
    )
    return await listed(request, (each.as_json() for each in found))


HANDLERS = [list_slos, set_slo, remove_slo, slo_report, slo_misses]
