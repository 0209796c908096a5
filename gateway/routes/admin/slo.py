"""Admin routes of targets: set, list, remove, report, misses."""

from __future__ import annotations

from litestar import Response, get
from litestar.params import FromQuery

from gateway.http.asgi import Request
from gateway.routes.admin.common import (
    READ,
)
from gateway.routes.context import admin_of, json_response
from gateway.routes.openapi_fields import one_of
from tenants.slo.slo import PERIOD_DAYS
from tenants.types import Tier


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


HANDLERS = [slo_report]
