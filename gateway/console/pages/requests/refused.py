"""What the page of refused requests shows beside them: the exact numbers by code, and the way out of each."""

from __future__ import annotations

from gateway.console.pages.filters import Filters, TenantScope
from gateway.console.pages.page_parts import PageParts
from gateway.console.pages.requests.ways_out import way_out
from tenants.admin.admin import Admin
from tenants.resources.reading import read_page
from tenants.resources.records.counts import REFUSAL_COUNTS, RefusalCountQuery
from tenants.resources.shown import Json

MOST_CODES = 1_000


async def counts_by_code(admin: Admin, filters: Filters, scope: TenantScope) -> Json:
    """Of the tenant and the time; other filters do not count."""
    query = RefusalCountQuery(
        window="total",
        group_by="code",
        tenant=scope.wanted,
        since=filters.instant("from"),
        until=filters.instant("to"),
    )
    page = await read_page(admin, REFUSAL_COUNTS, query, limit=MOST_CODES)
    rows = [row.shown for row in page.rows]
    return {"counts": sorted(rows, key=lambda row: (-row["count"], row["code"]))}


PARTS = PageParts(
    row=lambda refused, shown: shown | {"way_out": way_out(refused.code)},
    summary=counts_by_code,
    template="requests/refused.html",
)
