"""The full configuration file, and what the audit says of acts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tenants.admin.admin import Admin
from tenants.config_file.steps import differences
from tenants.resources.audit import AUDIT, AuditQuery
from tenants.resources.reading import read_page

FULL = (Path(__file__).parents[2] / "docs" / "fairgate.example.yaml").read_text()
"""The example of the documentation, which has everything that a file can hold."""


async def acts_since(admin: Admin, known: int) -> list[tuple[str, dict[str, tuple[Any, Any]]]]:
    """Each act after the first `known` audit rows: its name, and the fields that changed."""
    found: list[tuple[str, dict[str, tuple[Any, Any]]]] = []
    cursor = None
    while True:
        page = await read_page(admin, AUDIT, AuditQuery(order="oldest"), cursor=cursor, limit=1_000)
        found += [(row.action, differences(row.before, row.after)) for row in page.rows]
        cursor = page.next_cursor
        if cursor is None:
            return found[known:]
