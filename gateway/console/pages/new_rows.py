"""Counts rows that came after a list was loaded, and offers to load them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from litestar import Response

from gateway.console.rendering import SECURITY_HEADERS
from gateway.console.return_path import with_query
from tenants.admin.cursor import Page
from tenants.instants import from_us

MOST_NEW = 100
NEW = "new"
"""Suffix of the path that counts them."""


def newer_than(path: str, asked: Mapping[str, str], newest_us: int | None, *, is_first: bool) -> str:
    """The address that counts newer rows; empty: none can come (a later page, a list with an end, or not
    the newest first)."""
    if not is_first or asked.get("to") or asked.get("order") == "oldest" or asked.get("sort") == "slowest":
        return ""
    since = asked.get("from", "") if newest_us is None else from_us(newest_us + 1).isoformat()
    return with_query(f"{path}/{NEW}", {**asked, "from": since})


def words_for(found: Page[Any]) -> str:
    if found.next_cursor is not None:
        return f"More than {len(found.rows)} new" if found.rows else ""
    return f"{len(found.rows)} new" if found.rows else ""


def new_rows(found: Page[Any]) -> Response[str]:
    return Response(words_for(found), headers=SECURITY_HEADERS, media_type="text/plain; charset=utf-8")
