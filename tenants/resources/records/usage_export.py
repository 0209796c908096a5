"""Exports of usage: every page of an answer as one text, with few rows in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator
from zoneinfo import ZoneInfo

import msgspec

from tenants.admin.admin import Admin
from tenants.admin.cursor import MAX_PAGE
from tenants.directory.names import SHOWN
from tenants.errors import DatabaseUnavailable, Invalid
from tenants.resources.reading import check_filters
from tenants.resources.records.usage import UsageFile, UsagePage, usage_page
from tenants.usage.export import FOCUS_COLUMNS, GROUPS_EXPORTED, text_of
from tenants.usage.read import COLUMNS
from tenants.usage.sums import AMOUNTS


async def export_usage(admin: Admin, asked: UsageFile) -> AsyncIterator[str]:
    """The texts of a file, once the first page is read: what cannot be answered is refused before any.
    Raises `Invalid`, `NotFound`, `DatabaseUnavailable`."""
    check_filters(asked)
    groups = asked.groups or GROUPS_EXPORTED
    if asked.format == "focus":
        if asked.window == "total":
            raise Invalid("window", "of format focus is hour, day or month: a charge has one billing period")
        groups = tuple(dict.fromkeys((*GROUPS_EXPORTED, *groups)))
    asked = msgspec.structs.replace(asked, group_by=",".join(groups))
    return _texts(admin, asked, await _page(admin, asked, None))


async def _texts(admin: Admin, asked: UsageFile, page: UsagePage) -> AsyncIterator[str]:
    columns = FOCUS_COLUMNS if asked.format == "focus" else columns_of(asked.groups)
    zone, has_head = ZoneInfo(asked.time_zone), True
    while True:
        rows = await admin.with_names(page.as_json()["data"])
        yield text_of(asked.format, columns, rows, zone, has_head=has_head)
        if page.next_cursor is None:
            return
        page, has_head = await _page(admin, asked, page.next_cursor), False


async def _page(admin: Admin, asked: UsageFile, cursor: str | None) -> UsagePage:
    page = await usage_page(admin, asked, cursor=cursor, limit=MAX_PAGE)
    if not page.includes_unfolded:
        raise DatabaseUnavailable(
            "usage is still being added up, and a file would lack some: repeat it in a minute"
        )
    return page


def columns_of(groups: tuple[str, ...]) -> list[str]:
    """Names of the columns of usage by these groups, each id's name beside it."""
    columns = ["start", "end"]
    if "project" in groups and "tenant" not in groups:
        columns.append("tenant")
    for column in (COLUMNS.get(group, group) for group in groups):
        columns += [column, SHOWN[column][1]] if column in SHOWN else [column]
    return [*columns, *AMOUNTS]
