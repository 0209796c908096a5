"""The page of keys over all tenants, with findings."""

from __future__ import annotations

from dataclasses import dataclass

from litestar import Response

from gateway.console.access import own_tenants, page, tenant_shown, visit_of
from gateway.console.csv_file import FILE_ROWS, csv_list
from gateway.console.pages.tenant_parts.key_rows import FINDINGS, rows_of_keys
from gateway.console.rendering import page_response
from gateway.console.return_path import with_query
from gateway.http.asgi import Request
from gateway.routes.context import admin_of, gateway_of
from tenants.admin.cursor import MAX_PAGE, Page
from tenants.admin.lists.key_hygiene import KeyFinding
from tenants.admin.validation import plain_text
from tenants.directory.records import ApiKey, from_us
from tenants.errors import Invalid
from tenants.people.roles import Act

PATH = "/console/keys"
FILE = f"{PATH}.csv"
COLUMNS = (
    *("id", "name", "prefix", "tenant_id", "tenant", "project_id", "project", "status", "scopes", "models"),
    *("tiers", "default_tier", "allow_from", "created_at", "expires_at", "revoked_at", "last_used_at"),
)
MOST_SHOWN = 50


def finding_of(text: str) -> KeyFinding | None:
    if not text:
        return None
    if text not in list(KeyFinding):
        raise Invalid("finding", f"{text[:40]!r} is not one of {', '.join(KeyFinding)}")
    return KeyFinding(text)


@dataclass(frozen=True)
class KeyFilters:
    finding: str
    tenant: str

    def link(self, path: str, cursor: str | None = None) -> str:
        return with_query(path, {"finding": self.finding, "tenant": self.tenant, "cursor": cursor or ""})


def filters_of(request: Request) -> KeyFilters:
    query = request.query_params
    return KeyFilters(query.get("finding", ""), query.get("tenant", "").strip())


async def _found(request: Request, filters: KeyFilters, cursor: str | None, limit: int) -> Page[ApiKey]:
    finding, name = finding_of(filters.finding), filters.tenant
    owner = None if not name else await tenant_shown(request, plain_text("tenant", name))
    return await admin_of(request).keys.page(
        None if owner is None else owner.tenant_id,
        finding=finding,
        only=own_tenants(visit_of(request).person),
        cursor=cursor,
        limit=limit,
    )


@page(PATH, act=Act.READ_TENANT)
async def hygiene_page(request: Request) -> Response[str]:
    filters = filters_of(request)
    keys_page = await _found(request, filters, request.query_params.get("cursor"), MOST_SHOWN)
    return page_response(
        "tenants/hygiene.html",
        visit_of(request),
        keys=await rows_of_keys(request, keys_page.rows),
        findings=[(finding.value, words) for finding, words in FINDINGS.items()],
        finding=filters.finding,
        tenant=filters.tenant,
        next_page=filters.link(PATH, keys_page.next_cursor) if keys_page.next_cursor else "",
        first_page=filters.link(PATH) if "cursor" in request.query_params else "",
        file=filters.link(FILE),
        file_rows=FILE_ROWS,
    )


@page(FILE, act=Act.READ_TENANT)
async def keys_file(request: Request) -> Response[str]:
    filters, deps = filters_of(request), gateway_of(request).deps

    async def read(cursor: str | None) -> Page[dict[str, object]]:
        page = await _found(request, filters, cursor, MAX_PAGE)
        used = await deps.admin.keys.last_uses(page.rows)
        now = from_us(round(deps.wall_clock() * 1e6))
        shown = [
            key.as_json()
            | {
                "status": key.status(now),
                "last_used_at": used[key.key_id].isoformat() if key.key_id in used else None,
            }
            for key in page.rows
        ]
        return Page(await deps.admin.with_names(shown), page.next_cursor)

    cursor = request.query_params.get("cursor")
    return await csv_list("keys", COLUMNS, read, cursor, lambda after: filters.link(FILE, after))


HANDLERS = [hygiene_page, keys_file]
