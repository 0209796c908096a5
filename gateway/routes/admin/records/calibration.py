"""Admin route of calibration: how often what requests were told was kept."""

from __future__ import annotations

import math

from litestar import Response, get
from litestar.params import FromQuery

from engine.forecast.calibration import longest_wait_s
from gateway.http.asgi import Request
from gateway.routes.admin.common import READ
from gateway.routes.context import admin_of, json_response
from gateway.routes.openapi_fields import groups, one_of
from gateway.routes.refusals import BOUNDS, PAGES, Since, Until
from tenants.admin.cursor import DEFAULT_PAGE
from tenants.admin.lists.counts import (
    ALL_CALIBRATION_GROUPS,
    BY_DAY,
    DAY_S,
    LONGEST_CALIBRATION_S,
    CalibrationQuery,
)
from tenants.counts.calibration import FIGURES, KEPT_S, KINDS


@get(
    "/admin/v1/calibration",
    opt=READ
    | {"parameters": BOUNDS | {"figure": one_of(FIGURES), "kind": one_of(KINDS), "group_by": groups(BY_DAY)}},
    summary="Told against happened: how many requests stayed within the p50 and the p90 that they were told",
    description="Of requests that were answered in full and did not change their tier: their wait, time to"
    " first token, whole time and output tokens against the estimate made on arrival, or the quote that they"
    f" redeemed (`kind`: {', '.join(KINDS)}). `group_by`: some of {ALL_CALIBRATION_GROUPS}; all of them where"
    " it is left out; also `day` (UTC). `wait_bucket`: by the wait that was told (p50), at most"
    " `wait_up_to_s`. Filters: `model`, `tier`, `figure`, `kind`, `from`, `to` (whole hours; without"
    " `from` seven days, at most"
    f" {LONGEST_CALIBRATION_S // DAY_S}). {PAGES} Kept for {KEPT_S // DAY_S} days.",
)
async def read_calibration(
    request: Request,
    group_by: FromQuery[str] = ALL_CALIBRATION_GROUPS,
    model: FromQuery[str | None] = None,
    tier: FromQuery[str | None] = None,
    figure: FromQuery[str | None] = None,
    kind: FromQuery[str | None] = None,
    since: Since = None,
    until: Until = None,
    cursor: FromQuery[str | None] = None,
    limit: FromQuery[int] = DEFAULT_PAGE,
) -> Response[bytes]:
    query = CalibrationQuery(
        group_by=group_by, model=model, tier=tier, figure=figure, kind=kind, since=since, until=until
    )
    page = await admin_of(request).counts.calibration(query, cursor=cursor, limit=limit)
    for row in page.rows:
        if "wait_bucket" in row:
            longest_s = longest_wait_s(row["wait_bucket"])
            row["wait_up_to_s"] = None if math.isinf(longest_s) else round(longest_s, 2)
    return json_response({"object": "list", "data": page.rows, "next_cursor": page.next_cursor})


HANDLERS = [read_calibration]
