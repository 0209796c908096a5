"""What tenants did today (UTC), for their list: a few reads, however many tenants there are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from sqlalchemy import func, select

from gateway.gateway import Gateway
from tenants.admin.cursor import MAX_PAGE
from tenants.resources.reading import read_page
from tenants.resources.records.counts import REFUSAL_COUNTS, RefusalCountQuery
from tenants.resources.records.usage import UsageAsked, usage_page
from tenants.storage.tables import api_keys, key_uses


@dataclass(slots=True)
class Today:
    requests: int = 0
    cost_nanousd: int = 0
    refused: int = 0


async def today_of(gateway: Gateway) -> tuple[str, Mapping[str, Today]]:
    """When today began, and what was charged and refused since by tenant's id. Raises
    `DatabaseUnavailable`."""
    admin, found = gateway.deps.admin, defaultdict[str, Today](Today)
    now = datetime.fromtimestamp(gateway.deps.wall_clock(), UTC)
    since = now.replace(hour=0, minute=0, second=0, microsecond=0).isoformat()
    usage = await usage_page(admin, UsageAsked(since=since, group_by="tenant"), cursor=None, limit=MAX_PAGE)
    for row in usage.as_json()["data"]:
        one = found[row["tenant_id"]]
        one.requests, one.cost_nanousd = row["ended_requests"], row["cost_nanousd"]
    query = RefusalCountQuery(window="total", group_by="tenant", since=since)
    for counted in (await read_page(admin, REFUSAL_COUNTS, query, limit=MAX_PAGE)).rows:
        found[counted.shown["tenant_id"]].refused = counted.shown["count"]
    return since, found


async def last_uses(gateway: Gateway, tenant_ids: Collection[str]) -> Mapping[str, int]:
    """By tenant's id, when one of its keys was last used (microseconds), within a minute or so."""
    query = select(api_keys.c.tenant_id, func.max(key_uses.c.last_us).label("last_us")).join(
        key_uses, key_uses.c.key_id == api_keys.c.id
    )
    query = query.where(api_keys.c.tenant_id.in_(sorted(tenant_ids))).group_by(api_keys.c.tenant_id)
    rows = await gateway.deps.database.read(lambda one: one.execute(query).all())
    return {row.tenant_id: row.last_us for row in rows}
