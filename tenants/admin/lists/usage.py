"""Usage queries given in words, and acts on the sums behind them."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import msgspec
from sqlalchemy import Connection

from tenants.admin import validation
from tenants.admin.audit import Actor
from tenants.admin.cursor import Number, Text, checked_limit, decode_cursor, encode_cursor
from tenants.admin.transaction import AdminActs
from tenants.directory import queries
from tenants.directory.records import from_us, to_us
from tenants.errors import DatabaseUnavailable, Invalid
from tenants.outbox.figures import LedgerCheck, note_ledger_check
from tenants.types import Tier
from tenants.usage import verify
from tenants.usage.query import UsageQuery, check_groups, check_instant, midnight_us, next_month
from tenants.usage.read import COLUMNS, UsageRow, usage
from tenants.usage.sums import AMOUNTS, HOUR_US

DEFAULT_DAYS = {"total": 30, "hour": 1, "day": 30, "month": 365}
"""How long before `to` a query without `from` begins, by window."""
MAX_TEXT = 256
MOST_HOUR_ROWS = 50_000
"""Of four weeks by hour: some 70 models and tiers in use in every one of them."""
_LIST = "usage"


class UsageAsked(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A question in words. None: any; of a time: by default."""

    from_: str | None = msgspec.field(default=None, name="from")
    """An instant with a time zone, or a date: the beginning of that day."""
    to: str | None = None
    """The same, exclusive; None: the end of the current hour or day."""
    window: str = "total"
    group_by: str = ""
    """Names with commas between them."""
    time_zone: str = "UTC"
    tenant: str | None = None
    project: str | None = None
    key: str | None = None
    model: str | None = None
    tier: str | None = None
    outcome: str | None = None
    labels: tuple[str, ...] = ()
    """`name=value`."""

    @property
    def groups(self) -> tuple[str, ...]:
        return tuple(filter(None, map(str.strip, self.group_by.split(","))))


@dataclass(frozen=True, slots=True)
class UsagePage:
    query: UsageQuery
    rows: list[UsageRow]
    next_cursor: str | None
    folded_us: int
    includes_unfolded: bool

    def as_json(self) -> dict[str, Any]:
        folded_to = from_us(self.folded_us).isoformat() if self.folded_us else None
        return {
            "object": "list",
            "data": [self._row(row) for row in self.rows],
            "next_cursor": self.next_cursor,
            "folded_to": folded_to,
            "includes_unfolded": self.includes_unfolded,
        }

    def _row(self, row: UsageRow) -> dict[str, Any]:
        zone = ZoneInfo(self.query.time_zone)
        start_us, *values = row.key
        groups = zip(self.query.group_by, values, strict=True)
        return {
            "start": _shown(start_us, zone),
            "end": _shown(row.end_us, zone),
            **{COLUMNS.get(group, group): value or None for group, value in groups},
            **dict(zip(AMOUNTS, row.amounts, strict=True)),
        }


class UsageActs(AdminActs):
    async def read(self, asked: UsageAsked, *, cursor: str | None = None, limit: int = 100) -> UsagePage:
        """Raises `Invalid`, `NotFound`."""
        checked_limit(limit)
        # The range is in the cursor: by default it would move with the clock from page to page.
        query, filters = _query(asked, self._transactions.now_us()), msgspec.to_builtins(asked)
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

        return await self._transactions.read(look)

    async def hours(
        self, tenant: str, since_us: int, until_us: int, *, most: int = MOST_HOUR_ROWS
    ) -> list[UsageRow]:
        """By full hour, model and tier; the oldest `most` rows. Raises `Invalid`, `NotFound`."""

        def look(connection: Connection) -> list[UsageRow]:
            owner = queries.find_tenant(connection, tenant)
            query = UsageQuery(since_us, until_us, "hour", ("model", "tier"), tenant_id=owner.tenant_id)
            return usage(connection, query, None, most).rows

        return await self._transactions.read(look)

    async def verify(self) -> list[str]:
        """Some sums that differ from the ledger; alerts use the last result. Raises `DatabaseUnavailable`."""
        problems = await verify.usage_problems(self._transactions.database)
        await self._note_check(len(problems))
        return problems

    async def rebuild(self, actor: Actor | str) -> int:
        """Returns how many were wrong. Raises `DatabaseUnavailable`, `Invalid` if another rebuild begins."""
        await self._transactions.note(actor, "usage.rebuild", "usage")
        corrected = await verify.rebuild_usage(self._transactions.database)
        await self._note_check(0)
        return corrected

    async def _note_check(self, problems: int) -> None:
        check = LedgerCheck(self._transactions.now_us(), problems)
        with suppress(DatabaseUnavailable):
            await self._transactions.database.write(lambda one: note_ledger_check(one, check))


def _query(asked: UsageAsked, now_us: int) -> UsageQuery:
    """The query, with its tenant, project and key still in words. Raises `Invalid`."""
    zone = ZoneInfo(validation.iana_zone(asked.time_zone))
    groups = asked.groups
    check_groups(groups)
    if asked.window not in DEFAULT_DAYS:
        raise Invalid("window", f"{asked.window[:40]!r} is not one of {', '.join(DEFAULT_DAYS)}")
    to = _end(asked.window, now_us, zone) if asked.to is None else _instant_us("to", asked.to, zone)
    if asked.from_ is not None:
        begin = _instant_us("from", asked.from_, zone)
    else:
        begin = _begin(asked.window, to, zone)
    labels = tuple(_label(label) for label in asked.labels)
    return UsageQuery(begin, to, asked.window, groups, asked.time_zone, labels=labels)


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
    return to_us(validation.instant(field, text))


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
    for field in ("tenant", "project", "key", "model", "tier", "outcome"):
        _check_text(field, getattr(asked, field))
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
        tier=None if asked.tier is None else validation.choice("tier", Tier, asked.tier).value,
        outcome=asked.outcome,
    )


def _check_text(field: str, value: str | None) -> None:
    # PostgreSQL takes no NUL.
    if value is not None and not (0 < len(value) <= MAX_TEXT and value.isprintable()):
        raise Invalid(field, f"needs 1 to {MAX_TEXT} printable characters; leave it out for any")


def _shown(at_us: int, zone: ZoneInfo) -> str:
    return datetime.fromtimestamp(at_us / 1e6, UTC).astimezone(zone).isoformat()
