"""Admin routes of usage: what was charged, as an answer or a file, and whether its sums are the ledger's."""

from __future__ import annotations

from typing import Annotated

from litestar import Response, get, post
from litestar.di import NamedDependency
from litestar.params import FromQuery, QueryParameter
from litestar.response.streaming import ASGIStreamingResponse
from litestar.types import ASGIApp
from msgspec.structs import replace

from gateway.http.asgi import Request
from gateway.routes.admin.common import READ, WRITE, actor
from gateway.routes.context import admin_of, gateway_of, json_response
from gateway.routes.openapi_fields import one_of
from gateway.routes.views.usage_view import AMOUNTS_SHOWN, FILTERS, TIMES, by, shown_usage
from tenants.admin.cursor import DEFAULT_PAGE
from tenants.admin.lists.usage import UsageAsked
from tenants.admin.lists.usage_export import export_usage
from tenants.usage.export import FORMATS, GROUPS_EXPORTED
from tenants.usage.query import GROUPS

_QUESTION = (
    f"`group_by`: {', '.join(GROUPS)}, `label:<name>`, with commas between them. Filters: `tenant`,"
    " `project`, `key` (names or ids), `model`, `tier`, `outcome`, `label` (`team=search`, several times for"
    " several)."
    f" {TIMES}"
)


@get(
    "/admin/v1/usage",
    dependencies=FILTERS,
    opt=READ | {"parameters": by(GROUPS)},
    summary="Usage of all tenants by window and groups, as the ledger has it",
    description=f"{_QUESTION} {AMOUNTS_SHOWN}",
)
async def show_usage(
    request: Request,
    filters: NamedDependency[UsageAsked],
    tenant: FromQuery[str | None] = None,
    window: FromQuery[str] = "total",
    group_by: FromQuery[str] = "",
    cursor: FromQuery[str | None] = None,
    limit: FromQuery[int] = DEFAULT_PAGE,
) -> Response[bytes]:
    asked = replace(filters, tenant=tenant, window=window, group_by=group_by)
    return json_response(await shown_usage(admin_of(request), asked, cursor, limit))


@get(
    "/admin/v1/usage/export",
    dependencies=FILTERS,
    opt=READ
    | {
        "parameters": {"format": one_of(FORMATS), **by(GROUPS)},
        "media_types": sorted({*FORMATS.values()}),
    },
    summary="Usage of all tenants as a file, whole: FOCUS 1.2, CSV or JSON lines",
    description=f"{_QUESTION} By default by {', '.join(GROUPS_EXPORTED)}; `focus` always has these, and takes"
    " others (up to three) as tags. While charges are still being added up, 503. The body of a file that"
    " could not be ended is cut off, as HTTP tells.",
)
async def usage_file(
    request: Request,
    filters: NamedDependency[UsageAsked],
    tenant: FromQuery[str | None] = None,
    form: Annotated[str, QueryParameter(name="format")] = "focus",
    window: FromQuery[str] = "day",
    group_by: FromQuery[str] = "",
) -> ASGIApp:
    asked = replace(filters, tenant=tenant, window=window, group_by=group_by)
    texts = await export_usage(admin_of(request).transactions, asked, form)
    is_head = request.method == "HEAD"
    return ASGIStreamingResponse(iterator=texts, media_type=FORMATS[form], is_head_response=is_head)


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


HANDLERS = [show_usage, usage_file, verify_usage, rebuild_usage]
