"""Routes of usage: what was charged, as an answer or a file, and whether its sums are the ledger's."""

from __future__ import annotations

from litestar import Response, get, post
from litestar.response.streaming import ASGIStreamingResponse
from litestar.types import ASGIApp
from msgspec.structs import replace

from gateway.http.asgi import Request
from gateway.http.authentication import principal_of
from gateway.routes.admin.common import READ, WRITE, actor
from gateway.routes.context import admin_of, gateway_of, json_response
from gateway.routes.resource_routes import cursor_and_limit, query_in
from tenants.resources.records.usage import OwnUsageAsked, UsageAsked, UsageFile, shown_usage
from tenants.resources.records.usage_export import export_usage
from tenants.usage.export import FORMATS, GROUPS_EXPORTED
from tenants.usage.query import MOST_DAYS

_TIMES = (
    "By default of the last 30 days, of window `hour` 24 hours, of `month` 12 months; at most"
    f" {MOST_DAYS['hour']} days by the hour, {MOST_DAYS['day']} by the day, {MOST_DAYS['month']} otherwise."
    " `window` `total`: the whole time at once."
)
_AMOUNTS = (
    "`requests` are those that count against limits, `ended_requests` all that ended; `wait_us` is the sum of"
    " `waits` waits, `ttft_us` of `first_tokens` times to the first token. `folded_to`: the newest instant in"
    " the stored sums; what is newer is added from the ledger, unless `includes_unfolded` is false."
)


@get(
    "/v1/usage",
    opt={"scope": "usage:read", "query": OwnUsageAsked, "is_own": True},
    summary="This tenant's usage by window and groups, as it is charged",
    description=f"{_TIMES} {_AMOUNTS}",
)
async def own_usage(request: Request) -> Response[bytes]:
    asked = replace(query_in(request, OwnUsageAsked, is_own=True), tenant=principal_of(request).tenant_id)
    return await _shown(request, asked)


@get(
    "/admin/v1/usage",
    opt=READ | {"query": UsageAsked},
    summary="Usage of all tenants by window and groups, as the ledger has it",
    description=f"{_TIMES} {_AMOUNTS}",
)
async def show_usage(request: Request) -> Response[bytes]:
    return await _shown(request, query_in(request, UsageAsked))


async def _shown(request: Request, asked: UsageAsked) -> Response[bytes]:
    return json_response(await shown_usage(admin_of(request), asked, *cursor_and_limit(request)))


@get(
    "/admin/v1/usage/export",
    opt=READ | {"query": UsageFile, "is_whole": True, "media_types": sorted({*FORMATS.values()})},
    summary="Usage of all tenants as a file, whole: FOCUS 1.2, CSV or JSON lines",
    description=f"{_TIMES} By default grouped by {', '.join(GROUPS_EXPORTED)}; `focus` always has these,"
    " and takes others (up to three) as tags. While charges are still being added up, 503. The body of a file"
    " that could not be ended is cut off, as HTTP tells.",
)
async def usage_file(request: Request) -> ASGIApp:
    asked = query_in(request, UsageFile, is_whole=True)
    texts = await export_usage(admin_of(request), asked)
    is_head = request.method == "HEAD"
    return ASGIStreamingResponse(iterator=texts, media_type=FORMATS[asked.format], is_head_response=is_head)


@post(
    "/admin/v1/usage/verify",
    status_code=200,
    opt=READ,
    summary="Are the sums of usage what the ledger says?",
    description="Of all that is folded so far. `POST /admin/v1/ledger/verify` asks the same besides.",
)
async def verify_usage(request: Request) -> Response[bytes]:
    problems = (await gateway_of(request).usage_check.run()).problems
    return json_response({"ok": not problems, "problems": problems})


@post(
    "/admin/v1/usage/rebuild",
    status_code=200,
    opt=WRITE,
    summary="Make the sums of usage what the ledger says",
    description="While all goes on. `corrected`: how many sums were not. Where nothing is wrong, nothing"
    " changes.",
)
async def rebuild_usage(request: Request) -> Response[bytes]:
    corrected = await admin_of(request).usage.rebuild(actor(request))
    return json_response({"corrected": corrected})


HANDLERS = [own_usage, show_usage, usage_file, verify_usage, rebuild_usage]
