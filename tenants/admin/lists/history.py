"""Pages of what happened: missed targets, and versions of prices."""

from __future__ import annotations

from collections.abc import Mapping

from sqlalchemy import Connection, and_, or_

from tenants.admin import validation
from tenants.admin.cursor import (
    DEFAULT_PAGE,
    Number,
    Page,
    Text,
    beyond,
    checked_limit,
    decode_cursor,
    page_of,
)
from tenants.admin.lists.scans import between, end_of_scan
from tenants.admin.prices import PriceRow, history
from tenants.admin.transaction import AdminCommands
from tenants.directory import queries
from tenants.errors import NotFound
from tenants.slo import store as slo_store
from tenants.slo.slo import Missed
from tenants.storage import tables
from tenants.types import Tier


class HistoryLists(AdminCommands):
    async def page_misses(
        self,
        *,
        tenant: str | None = None,
        tier: str | None = None,
        cause: str | None = None,
        since: str | None = None,
        until: str | None = None,
        cursor: str | None = None,
        limit: int = DEFAULT_PAGE,
    ) -> Page[Missed]:
        """Newest first, that ended from `since` (ISO 8601) until before `until`, with their evidence. A page
        scans a bounded number of rows: it may be shorter than `limit`. Raises `Invalid`, `NotFound`."""
        most, filters = checked_limit(limit), {"tenant": tenant, "tier": tier, "cause": cause}
        filters |= {"from": since, "to": until}
        if tier is not None:
            validation.choice("tier", Tier, tier)
        if cause is not None:
            validation.plain_text("cause", cause)
        table, order = tables.slo_misses, slo_store.MISS_ORDER
        last = None if cursor is None else decode_cursor("misses", filters, cursor, tuple[Number, Text, Text])

        def look(connection: Connection) -> tuple[list[Missed], tuple[int | str, ...] | None]:
            wanted = [] if last is None else [beyond(order, last, newest_first=True)]
            if tenant is not None:
                wanted.append(table.c.tenant_id == queries.find_tenant(connection, tenant).tenant_id)
            elif cause is not None:
                wanted.append(table.c.cause == cause)
            wanted += between(table.c.at_us, since, until)
            end = end_of_scan(connection, order, wanted)
            if end is not None:
                wanted.append(~beyond(order, end, newest_first=True))
            rest: Mapping[str, str | None] = {"tier": tier, "cause": cause}
            wanted += [table.c[name] == value for name, value in rest.items() if value is not None]
            return slo_store.misses(connection, wanted, most + 1), end

        rows, end = await self._database.read(look)
        return page_of(rows, most, "misses", filters, _miss_key, scanned_to=end)

    async def page_price_history(
        self, model: str, *, cursor: str | None = None, limit: int = DEFAULT_PAGE
    ) -> Page[PriceRow]:
        """Every version's rows of one model, newest first. Raises `Invalid`, `NotFound`."""
        most, filters = checked_limit(limit), {"model": model}
        validation.plain_text("model", model)
        table = tables.prices
        last = (
            None if cursor is None else decode_cursor("price history", filters, cursor, tuple[Number, Text])
        )
        after = []
        if last is not None:
            same = and_(table.c.version == last[0], table.c.tier > last[1])
            after.append(or_(table.c.version < last[0], same))
        rows = await self._database.read(lambda one: history(one, model, most + 1, *after))
        if not rows and last is None:
            raise NotFound("price", model)
        page = page_of(rows, most, "price history", filters, lambda row: (row.version, row.tier.value))
        tiers = list(Tier)
        shown = sorted(page.rows, key=lambda row: (-row.version, tiers.index(row.tier)))
        return Page(shown, page.next_cursor)


def _miss_key(each: Missed) -> tuple[int, str, str]:
    return each.at_us, each.request_id, each.metric
