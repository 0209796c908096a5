"""How many rows came after a list was loaded: it holds still and says so, and a click loads them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from litestar import Response

from gateway.console.rendering import SECURITY_HEADERS
from gateway.console.return_path import with_query
from tenants.admin.cursor import Page
from tenants.directory.records import from_us

MOST_NEW = 100
"""More new ones are not counted."""
NEW = "new"
"""Ends the path that says how many there are."""


def newer_than(path: str, asked: Mapping[str, str], newest_us: int | None, *, is_first: bool) -> str:
    """The address that says how many have come since the newest row shown (None: there is none); empty: there
    are never new ones (a later page, or a list with an end)."""
    if not is_first or asked.get("to"):
        return ""
    since = asked.get("from", "") if newest_us is None else from_us(newest_us + 1).isoformat()
    return with_query(f"{path}/{NEW}", {**asked, "from": since})


def words_for(found: Page[Any]) -> str:
    """The link to them; empty: there are none."""
    if found.next_cursor is not None:
        return f"More than {len(found.rows)} new" if found.rows else ""
    return f"{len(found.rows)} new" if found.rows else ""


def new_rows(found: Page[Any]) -> Response[str]:
    """How many, in words, for the script of a page that holds still."""
    return Response(words_for(found), headers=SECURITY_HEADERS, media_type="text/plain; charset=utf-8")
