"""What the page of the audit shows beside its rows: how many of them are signed, and with which key."""

from __future__ import annotations

from gateway.console.pages.filters import Filters, TenantScope
from gateway.console.pages.page_parts import PageParts
from tenants.admin.admin import Admin
from tenants.resources.shown import Json


async def _log(admin: Admin, filters: Filters, scope: TenantScope) -> Json:
    return {"log": await admin.transactions.audit_log().state()}


PARTS = PageParts(summary=_log, template="platform/audit.html")
