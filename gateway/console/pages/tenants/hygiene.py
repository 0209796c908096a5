"""The page of keys over all tenants, with findings."""

from __future__ import annotations

from litestar import Response

from gateway.console.access import own_tenants, page, tenant_shown, visit_of
from gateway.console.csv_file import FILE_ROWS, csv_list
from gateway.console.pages.filters import Filters, filters_of
from gateway.console.pages.tenant_parts.key_rows import FINDINGS, rows_of_keys
from gateway.console.rendering import page_response
from gateway.http.asgi import Request
from gateway.routes.context import admin_of
from tenants.admin.cursor import MAX_PAGE, Page
from tenants.nouns.checks import plain_text
from tenants.people.roles import Act
from tenants.resources.keys import KEYS, KeyQuery, ListedKey
from tenants.resources.reading import read_page

PATH = "/console/keys"
FILE = f"{PATH}.csv"
FILTERS = ("finding", "tenant")
MOST_SHOWN = 50


async def _found(request: Request, filters: Filters, cursor: str | None, limit: int) -> Page[ListedKey]:
    name, tenant = filters.get("tenant"), None
    if name is not None:
        tenant = (await tenant_shown(request, plain_text("tenant", name))).tenant_id
    query = KeyQuery(tenant=tenant, finding=filters.get("finding"))
    only = own_tenants(visit_of(request).person)
    return await read_page(admin_of(request), KEYS, query, cursor=cursor, limit=limit, only=only)


@page(PATH, act=Act.READ_TENANT)
async def hygiene_page(request: Request) -> Response[str]:
    filters = filters_of(request, PATH, FILTERS)
    keys_page = await _found(request, filters, filters.cursor, MOST_SHOWN)
    return page_response(
        "tenants/hygiene.html",
        visit_of(request),
        keys=await rows_of_keys(request, keys_page.rows),
        findings=[(finding.value, words) for finding, words in FINDINGS.items()],
        finding=filters.values["finding"],
        tenant=filters.values["tenant"],
        next_page=filters.link(cursor=keys_page.next_cursor) if keys_page.next_cursor else "",
        first_page=filters.link() if filters.cursor is not None else "",
        file=filters.link(FILE),
        file_rows=FILE_ROWS,
    )


@page(FILE, act=Act.READ_TENANT)
async def keys_file(request: Request) -> Response[str]:
    filters = filters_of(request, FILE, FILTERS)

    async def read(cursor: str | None) -> Page[dict[str, object]]:
        page = await _found(request, filters, cursor, MAX_PAGE)
        return Page(await admin_of(request).with_names(map(ListedKey.as_json, page.rows)), page.next_cursor)

    return await csv_list("keys", KEYS.file, read, filters.cursor, lambda cursor: filters.link(cursor=cursor))


HANDLERS = [hygiene_page, keys_file]
