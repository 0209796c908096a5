"""Questions about usage in words, and their answers in pages."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, timedelta
from typing import Annotated, Any
from zoneinfo import ZoneInfo

import msgspec
from sqlalchemy import Connection

from tenants.admin.admin import Admin
from tenants.admin.cursor import DEFAULT_PAGE, Number, Text, checked_limit, decode_cursor, encode_cursor
from tenants.directory import queries
from tenants.errors import Invalid
from tenants.instants import from_us, to_us
from tenants.nouns import checks
from tenants.resources.query import Filter, Kind, ListQuery
from tenants.resources.reading import TIMES, check_filters
from tenants.resources.shown import Json
from tenants.types import Tier
from tenants.usage.export import FORMATS
from tenants.usage.query import (
    GROUPS,
    LABEL,
    MAX_NAME,
    MOST_LABELS,
    WINDOWS,
    UsageQuery,
    check_groups,
    check_instant,
    midnight_us,
    next_month,
)
from tenants.usage.read import COLUMNS, UsageRow, usage
from tenants.usage.sums import AMOUNTS, HOUR_US

DEFAULT_DAYS = {"total": 30, "hour": 1, "day": 30, "month": 365}
"""How long before `to` a query without `from` begins, by window."""
OWN_GROUPS = tuple(group for group in GROUPS if group != "tenant")
_LIST = "usage"
_DATE_OR_INSTANT = {"anyOf": [{"format": "date-time"}, {"format": "date"}]}


def _grouped_by(groups: tuple[str, ...], usual: str = "") -> Filter:
    word = "|".join((*groups, f"{LABEL}[^,]+"))
    return Filter(
        option="--by",
        usual=usual,
        help=f"Of {', '.join(groups)}, {LABEL}<name>, separated by commas.",
        schema={"pattern": f"^(({word})(,({word}))*)$"},
    )


def _summed_by() -> Filter:
    return Filter(kind=Kind.CHOICE, choices=WINDOWS, help="Length of each row's window.")


class UsageAsked(ListQuery, frozen=True, rename=TIMES | {"labels": "label"}):
    """A question in words. None: any; of a time: by default."""

    since: Annotated[
        str | None,
        Filter(
            kind=Kind.START,
            help="Start, by default 30 days ago: a date or an instant.",
            schema=_DATE_OR_INSTANT,
        ),
    ] = None
    """A date: the beginning of that day."""
    until: Annotated[
        str | None,
        Filter(
            kind=Kind.START,
            help="End (exclusive), by default now: a date or an instant.",
            schema=_DATE_OR_INSTANT,
        ),
    ] = None
    """None: the end of the current hour or day."""
    window: Annotated[str, _summed_by()] = "total"
    group_by: Annotated[str, _grouped_by(GROUPS, "tenant")] = ""
    time_zone: Annotated[
        str,
        Filter(
            help="Time zone of days and months.",
            schema={"pattern": f"^({checks.ZONE.pattern})$", "maxLength": checks.MAX_ZONE_CHARS},
        ),
    ] = "UTC"
    tenant: Annotated[str | None, Filter(kind=Kind.TENANT, help="Only this tenant's (name or id).")] = None
    project: Annotated[
        str | None,
        Filter(kind=Kind.PROJECT),
    ] = None
    key: Annotated[str | None, Filter(kind=Kind.KEY, help="Only this key's (id or visible prefix).")] = None
    model: Annotated[str | None, Filter(help="Only this model.")] = None
    tier: Annotated[str | None, Filter(kind=Kind.CHOICE, choices=tuple(Tier), help="Only this tier.")] = None
    outcome: Annotated[str | None, Filter(help="Only requests with this outcome.")] = None
    labels: Annotated[
        tuple[str, ...],
        Filter(
            kind=Kind.SEVERAL,
            help="Only with this label, as NAME=VALUE (repeat).",
            schema={
                "type": "array",
                "maxItems": MOST_LABELS,
                "items": {"type": "string", "pattern": f"^[^=]{{1,{MAX_NAME}}}=.{{1,{MAX_NAME}}}$"},
            },
        ),
    ] = ()

    @property
    def groups(self) -> tuple[str, ...]:
        return tuple(filter(None, map(str.strip, self.group_by.split(","))))


class OwnUsageAsked(UsageAsked, frozen=True, rename=TIMES | {"labels": "label"}):
    """The same of one tenant, as it asks for itself."""

    group_by: Annotated[str, _grouped_by(OWN_GROUPS)] = ""


class UsageFile(UsageAsked, frozen=True, rename=TIMES | {"labels": "label"}):
    """The same as a file, whole."""

    format: Annotated[str, Filter(kind=Kind.CHOICE, choices=tuple(FORMATS))] = "focus"
    window: Annotated[str, _summed_by()] = "day"
    group_by: Annotated[str, _grouped_by(GROUPS)] = ""


@dataclass(frozen=True, slots=True)
class UsagePage:
    query: UsageQuery
    rows: list[UsageRow]
    next_cursor: str | None
    folded_us: int
    includes_unfolded: bool

    def as_json(self) -> Json:
        folded_to = from_us(self.folded_us).isoformat() if self.folded_us else None
        return {
            "object": "list",
            "data": [self._row(row) for row in self.rows],
            "next_cursor": self.next_cursor,
            "folded_to": folded_to,
            "includes_unfolded": self.includes_unfolded,
        }

    def _row(self, row: UsageRow) -> Json:
        zone = ZoneInfo(self.query.time_zone)
        start_us, *values = row.key
        groups = zip(self.query.group_by, values, strict=True)
        return {
            "start": _shown(start_us, zone),
            "end": _shown(row.end_us, zone),
            **{COLUMNS.get(group, group): value or None for group, value in groups},
            **dict(zip(AMOUNTS, row.amounts, strict=True)),
        }


async def usage_page(
    admin: Admin, asked: UsageAsked, *, cursor: str | None = None, limit: int = DEFAULT_PAGE
) -> UsagePage:
    """Raises `Invalid`, `NotFound`."""
    checked_limit(limit)
    check_filters(asked)
    # The range is in the cursor: by default it would move with the clock from page to page.
    query, filters = _query(asked, admin.transactions.now_us()), msgspec.to_builtins(asked)
    after: tuple[Any, ...] | None = None
    if cursor is not None:
        key: Any = tuple[(Number, Number, Number, *[Text] * len(query.group_by))]  # type: ignore[misc]
        begin_us, end_us, *last = decode_cursor(_LIST, filters, cursor, key)
        query, after = replace(query, from_us=begin_us, to_us=end_us), tuple(last)

    def look(connection: Connection) -> UsagePage:
        wanted = _resolved(connection, query, asked)
        rows = usage(connection, wanted, after, limit)
        last = (query.from_us, query.to_us, *rows.rows[-1].key) if rows.has_more else None
        following = None if last is None else encode_cursor(_LIST, filters, last)
        return UsagePage(wanted, rows.rows, following, rows.folded_us, rows.includes_unfolded)

    return await admin.transactions.read(look)


async def shown_usage(admin: Admin, asked: UsageAsked, cursor: str | None, limit: int) -> Json:
    """One page of an answer, with names added to ids. Raises `Invalid`, `NotFound`."""
    answer = (await usage_page(admin, asked, cursor=cursor, limit=limit)).as_json()
    return answer | {"data": await admin.with_names(answer["data"])}


def _query(asked: UsageAsked, now_us: int) -> UsageQuery:
    """The query, with its tenant, project and key still in words. Raises `Invalid`."""
    zone = ZoneInfo(checks.iana_zone(asked.time_zone))
    check_groups(asked.groups, OWN_GROUPS if isinstance(asked, OwnUsageAsked) else GROUPS)
    to = _end(asked.window, now_us, zone) if asked.until is None else _instant_us("to", asked.until, zone)
    if asked.since is not None:
        begin = _instant_us("from", asked.since, zone)
    else:
        begin = _begin(asked.window, to, zone)
    labels = tuple(_label(label) for label in asked.labels)
    return UsageQuery(begin, to, asked.window, asked.groups, asked.time_zone, labels=labels)


def _label(text: str) -> tuple[str, str]:
    name, is_there, value = text.partition("=")
    if not is_there:
        raise Invalid("label", f"{text[:40]!r} is not a name and a value, such as team=search")
    return name, value


def _instant_us(field: str, text: str, zone: ZoneInfo) -> int:
    try:
        at_us = midnight_us(date.fromisoformat(text), zone) if len(text) == 10 else _exact_us(field, text)
    except (ValueError, OverflowError):
        raise Invalid(
            field,
            f"{text[:40]!r} is neither a date such as 2026-01-31 nor an instant with a time zone, such as"
            " 2026-01-31T18:00:00+01:00",
        ) from None
    check_instant(field, at_us)
    return at_us


def _exact_us(field: str, text: str) -> int:
    return to_us(checks.instant(field, text))


def _end(window: str, now_us: int, zone: ZoneInfo) -> int:
    """The end of the current hour, or of the current day in the zone."""
    if window == "hour":
        return now_us // HOUR_US * HOUR_US + HOUR_US
    return midnight_us(from_us(now_us).astimezone(zone).date() + timedelta(days=1), zone)


def _begin(window: str, end_us: int, zone: ZoneInfo) -> int:
    """When a query up to `end_us` without `from` begins."""
    if window == "hour":
        return end_us - 24 * HOUR_US
    day = from_us(end_us).astimezone(zone).date() - timedelta(days=DEFAULT_DAYS[window])
    return midnight_us(next_month(day) if window == "month" else day, zone)


def _resolved(connection: Connection, query: UsageQuery, asked: UsageAsked) -> UsageQuery:
    """Raises `NotFound`, `Invalid`."""
    tenant = None if asked.tenant is None else queries.find_tenant(connection, asked.tenant)
    project = None if asked.project is None else queries.find_project(connection, asked.project, tenant)
    tenant_id = None if tenant is None else tenant.tenant_id
    key = None if asked.key is None else queries.find_key(connection, asked.key, tenant_id)
    # The owner of what is named: sums of one tenant are found faster.
    owners = [reference.tenant_id for reference in (tenant, project, key) if reference is not None]
    return replace(
        query,
        tenant_id=owners[0] if owners else None,
        project_id=None if project is None else project.project_id,
        key_id=None if key is None else key.key_id,
        model=asked.model,
        tier=asked.tier,
        outcome=asked.outcome,
    )


def _shown(at_us: int, zone: ZoneInfo) -> str:
    return datetime.fromtimestamp(at_us / 1e6, UTC).astimezone(zone).isoformat()
