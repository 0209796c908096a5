"""Admin routes of service by minute: tenants against their fair shares, and engines."""

from __future__ import annotations

from typing import Annotated

from litestar import Response, get
from litestar.params import FromQuery, QueryParameter

from gateway.http.asgi import Request
from gateway.routes.admin.common import READ
from gateway.routes.context import admin_of, json_response
from gateway.routes.openapi_fields import between, one_of
from tenants.admin.cursor import DEFAULT_PAGE, MAX_PAGE
from tenants.admin.lists.flow import LONGEST_US, WINDOWS_US
from tenants.counts.minute_store import HOUR_US
from tenants.types import Tier

PAGE = {"limit": between(1, MAX_PAGE)}
SPAN = (
    "`from` and `to`: instants with a time zone, the second exclusive, widened to whole windows; at most"
    f" {LONGEST_US['minute'] // HOUR_US} hours of minutes"
)
CONTINUED = (
    f"At most `limit` rows, up to {MAX_PAGE}, the oldest first; `next_cursor` gives the next page as"
    " `cursor`, with the same filter."
)


@get(
    "/admin/v1/flow",
    opt=READ | {"parameters": PAGE | {"window": one_of(WINDOWS_US), "tier": one_of(Tier)}},
    summary="What tenants had of each pool against their fair shares, by minute or hour",
    description="Of each window, pool, tier and tenant with something in it: `served_tokens` (cost tokens:"
    " input + 2 x output), `fair_tokens` (what it would have had of the same service under the ideal fair"
    " share),"
    " `mean_waiting_tokens` (cost tokens in line, mean), `arrivals` (requests that lined up) and"
    " `mean_before_line_s` (from a request's first byte until it lined up, without its tenant's limits). Of a"
    f" window and pool both sums are equal. {SPAN}, {LONGEST_US['hour'] // HOUR_US} of hours; left out: the"
    f" last hour, or day. {CONTINUED}",
)
async def show_flow(
    request: Request,
    from_: Annotated[str | None, QueryParameter(name="from")] = None,
    to: FromQuery[str | None] = None,
    window: FromQuery[str] = "minute",
    pool: FromQuery[str | None] = None,
    tier: FromQuery[str | None] = None,
    tenant: FromQuery[str | None] = None,
    cursor: FromQuery[str | None] = None,
    limit: FromQuery[int] = DEFAULT_PAGE,
) -> Response[bytes]:
    admin = admin_of(request)
    page = await admin.flow.page(
        since=from_, until=to, window=window, pool=pool, tier=tier, tenant=tenant, cursor=cursor, limit=limit
    )
    data = await admin.with_names(row.as_json() for row in page.rows)
    return json_response({"object": "list", "data": data, "next_cursor": page.next_cursor})


@get(
    "/admin/v1/engines",
    opt=READ | {"parameters": PAGE},
    summary="What engines did, by minute and replica",
    description="As seen by the gateway that saw the replica longest in that minute: `state` at its end"
    " (`up`, `down`), `seen_s`, `up_s`, `idle_s` (up, and no step ran), `steps`, `mean_step_s`, `mean_batch`"
    " (sequences of a step), `computed_tokens` (prompts), `emitted_tokens`, `recomputed_tokens` (after a"
    " preemption), `preemptions`, `kv_share` (of the KV cache in use, mean). Of other servers, which report"
    f" no steps, the counts of steps and tokens are 0. {SPAN}; left out: the last hour. {CONTINUED}",
)
async def show_engines(
    request: Request,
    from_: Annotated[str | None, QueryParameter(name="from")] = None,
    to: FromQuery[str | None] = None,
    pool: FromQuery[str | None] = None,
    replica: FromQuery[str | None] = None,
    cursor: FromQuery[str | None] = None,
    limit: FromQuery[int] = DEFAULT_PAGE,
) -> Response[bytes]:
    page = await admin_of(request).flow.page_engines(
        since=from_, until=to, pool=pool, replica=replica, cursor=cursor, limit=limit
    )
    data = [row.as_json() for row in page.rows]
    return json_response({"object": "list", "data": data, "next_cursor": page.next_cursor})


HANDLERS = [show_flow, show_engines]
