"""What the page of usage reads: a period by window and groups, and the period before it.

One answer gives table, chart and totals wherever it fits into one page, so that they cannot disagree while
requests settle. Where it does not, groups come in pages, and totals and the chart are those of all groups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from msgspec.structs import replace

from gateway.console.pages.money.amounts import SummedUsage, amounts_of, sum_of
from gateway.console.pages.money.usage_view import Ids, Row, period_before, summed
from tenants.admin.admin import Admin
from tenants.admin.cursor import MAX_PAGE
from tenants.errors import Invalid
from tenants.instants import from_us as instant_of
from tenants.resources.records.usage import UsageAsked, UsagePage, usage_page
from tenants.usage.query import UsageQuery

GROUPS_SHOWN = 200
"""Groups on one page of a list that does not fit into one answer."""
TOO_MANY = f"The period before has more than {MAX_PAGE:,} groups: filter to compare them."


@dataclass(frozen=True)
class Before:
    """The period before."""

    total: SummedUsage | None
    """None: unknown, for the reason `why`."""
    groups: Mapping[Ids, SummedUsage] | None
    """None: unknown by group."""
    why: str = ""


@dataclass(frozen=True)
class UsageRead:
    """What was found."""

    query: UsageQuery
    rows: list[Row]
    """By groups, perhaps by windows as well."""
    over_time: list[Row]
    """By windows, and by groups where `is_whole`."""
    total: SummedUsage
    before: Before
    is_whole: bool
    """All groups are in `rows`."""
    next_cursor: str | None
    folded_us: int
    includes_unfolded: bool


async def read_usage(admin: Admin, asked: UsageAsked, cursor: str | None) -> UsageRead:
    """The period and the one before. `cursor`: of groups that come in pages. Raises `Invalid`, `NotFound`."""
    first, rows = await _rows(admin, asked)
    from_us, to_us = first.query.from_us, first.query.to_us
    begin, end = (instant_of(instant_us).isoformat() for instant_us in (from_us, to_us))
    is_whole = first.next_cursor is None
    over_time, total, following = rows, sum_of(map(amounts_of, rows)), None
    answers = [first]
    if not is_whole:
        by_group = replace(asked, since=begin, until=end, window="total")
        grouped, rows = await _rows(admin, by_group, cursor, GROUPS_SHOWN)
        all_together, over_time = await _rows(admin, replace(asked, since=begin, until=end, group_by=""))
        total, following = sum_of(map(amounts_of, over_time)), grouped.next_cursor
        answers = [grouped, all_together]
    before = await _before(admin, asked, *period_before(from_us, to_us, first.query.time_zone))
    return UsageRead(
        query=first.query,
        rows=rows,
        over_time=over_time,
        total=total,
        before=before,
        is_whole=is_whole,
        next_cursor=following,
        folded_us=first.folded_us,
        includes_unfolded=all(answer.includes_unfolded for answer in answers),
    )


async def _before(admin: Admin, asked: UsageAsked, begin: str, end: str) -> Before:
    wanted = replace(asked, since=begin, until=end, window="total")
    try:
        first, rows = await _rows(admin, wanted)
        if first.next_cursor is None:
            return Before(sum_of(map(amounts_of, rows)), summed(rows, first.query.group_by))
        _, rows = await _rows(admin, replace(wanted, group_by=""))
        return Before(sum_of(map(amounts_of, rows)), None, TOO_MANY)
    except Invalid as error:  # hours that are not kept any more
        return Before(None, None, f"The period before cannot be told: {error.message}.")


async def _rows(
    admin: Admin, asked: UsageAsked, cursor: str | None = None, most: int = MAX_PAGE
) -> tuple[UsagePage, list[Row]]:
    page = await usage_page(admin, asked, cursor=cursor, limit=most)
    return page, [*(await admin.with_names(page.as_json()["data"]))]
