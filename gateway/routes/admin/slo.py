"""Admin routes of targets: set, list, remove, report, misses."""

from __future__ import annotations

from litestar import Response, delete, get, post
from litestar.params import FromPath, FromQuery

from gateway.http.asgi import Request
from gateway.routes.admin.common import (
    CHANGE,
    PAGED,
    READ,
    actor,
    changed,
    if_match,
    named,
    paged,
    tagged,
)
from gateway.routes.context import admin_of, asked, gateway_of, json_response
from gateway.routes.openapi_fields import one_of
from tenants.admin.commands import SloSet
from tenants.admin.cursor import DEFAULT_PAGE, PAGES
from tenants.slo.slo import METRICS, PERIOD_DAYS, Slo
from tenants.types import Tier


@get(
    "/admin/v1/slos",
    opt=PAGED,
    summary="List targets, all of them or those that bind one tenant",
    description=PAGES,
)
async def list_slos(
    request: Request,
    tenant: FromQuery[str | None] = None,
    cursor: FromQuery[str | None] = None,
    limit: FromQuery[int] = DEFAULT_PAGE,
) -> Response[bytes]:
    page = await admin_of(request).slos.page(tenant, cursor=cursor, limit=limit)
    return await paged(request, page, Slo.as_json)


@get("/admin/v1/slos/{slo:str}", opt=READ, summary="Show a target")
async def show_slo(request: Request, slo: FromPath[str]) -> Response[bytes]:
    shown = await admin_of(request).slos.show(slo)
    return tagged(json_response(await named(request, shown.as_json())), shown.as_json())


@post(
    "/admin/v1/slos",
    status_code=201,
    opt=CHANGE | {"body": SloSet},
    summary="Set a target",
    description="Of a tier, or of one tenant in a tier, whose own target then counts instead. The same"
    f" tenant, tier and metric are replaced; what was counted stays. `metric`: {', '.join(METRICS)}.",
)
async def set_slo(request: Request) -> Response[bytes]:
    wanted = await asked(request, SloSet)
    gateway = gateway_of(request)
    slo = await gateway.deps.admin.slos.set(actor(request), wanted, if_match=if_match(request))
    answer = await changed(request, await named(request, slo.as_json()), 201, stored=slo.as_json())
    await gateway.slo.refresh()
    return answer


@delete("/admin/v1/slos/{slo:str}", status_code=200, opt=CHANGE, summary="Remove a target")
async def remove_slo(request: Request, slo: FromPath[str]) -> Response[bytes]:
    gateway = gateway_of(request)
    removed = await gateway.deps.admin.slos.remove(actor(request), slo, if_match=if_match(request))
    answer = await changed(request, await named(request, removed.as_json()))
    await gateway.slo.refresh()
    return answer


@get(
    "/admin/v1/slo/report",
    opt=READ | {"parameters": {"tier": one_of(Tier)}},
    summary="How targets were met: attainment, error budgets, burn rates, causes",
    description=f"Over {PERIOD_DAYS} days, by tenant, tier and metric. `burn`: rates over a long and a short "
    "window; both at `fires_at` or above is an alert. `causes` counts misses.",
)
async def slo_report(
    request: Request, tenant: FromQuery[str | None] = None, tier: FromQuery[str | None] = None
) -> Response[bytes]:
    reports = await admin_of(request).slos.report(tenant, tier)
    return json_response({"object": "list", "data": [report.as_json() for report in reports]})


HANDLERS = [list_slos, show_slo, set_slo, remove_slo, slo_report]
