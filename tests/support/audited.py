"""The audit log as tests read it: one page, in the order in which it was written."""

from __future__ import annotations

from typing import Any

from tenants.admin.admin import Admin
from tenants.admin.audit import AuditRow
from tenants.admin.cursor import MAX_PAGE
from tenants.resources.audit import AUDIT, AuditQuery
from tenants.resources.reading import read_page


async def audited(admin: Admin, **wanted: Any) -> list[AuditRow]:
    """The rows of a filter, all of them."""
    page = await read_page(admin, AUDIT, AuditQuery(**wanted, order="oldest"), limit=MAX_PAGE)
    assert page.next_cursor is None
    return page.rows
