"""Limits as they are stored."""

from __future__ import annotations

from tenants.admin.admin import Admin
from tenants.resources.limits import LIMITS, LimitQuery
from tenants.resources.reading import read_all
from tenants.types import Limit


async def limits_of(admin: Admin, tenant: str | None = None) -> list[Limit]:
    return [view.limit for view in await read_all(admin, LIMITS, LimitQuery(tenant=tenant))]
