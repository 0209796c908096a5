"""Sums of what gateways count beside the accounts, by groups: refusals, and stated against actual figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Annotated, Any

import msgspec
from sqlalchemy import Connection, Integer, func, literal_column, select
from sqlalchemy.sql import ColumnElement

from tenants.admin import validation
from tenants.admin.cursor import Page, Text, beyond, checked_limit, decode_cursor, page_of
from tenants.admin.lists.refusals import MAX_NAME_CHARACTERS, RENAMED, Conditions, Instant, one_of, text
from tenants.admin.transaction import AdminActs
from tenants.counts.calibration import FIGURES, KINDS, KeptCount
from tenants.counts.refusal_store import MAX_CODE_CHARACTERS, MAX_ID_CHARACTERS, MAX_MODEL_CHARACTERS
from tenants.directory import queries
from tenants.directory.records import from_us, to_us
from tenants.errors import Invalid
from tenants.storage.tables import calibration_counts, refusal_counts
from tenants.types import Tier

DAY_S = 86_400
WINDOWS_S = {"minute": 60, "hour": 3600, "total": 3600}
"""Windows begin at multiples of this; `total`: the whole time at once, of whole hours."""
USUAL_S = {"minute": 3600, "hour": DAY_S, "total": DAY_S}
"""How far back counts of refusals go where `from` is not given, by window."""
LONGEST_S = {"minute": DAY_S, "hour": 90 * DAY_S, "total": 90 * DAY_S}
"""Of one answer."""
USUAL_CALIBRATION_S = 7 * DAY_S
LONGEST_CALIBRATION_S = 31 * DAY_S
REFUSAL_GROUPS = {"tenant": "tenant_id", "code": "code", "limit": "limit_id"}
CALIBRATION_GROUPS = {
    "model": "model",
    "tier": "tier",
    "figure": "figure",
    "wait": "wait_bucket",
    "kind": "kind",
}
"""Words of `group_by`, and their columns."""
BY_DAY = {"day": "start"} | CALIBRATION_GROUPS
"""The same of calibration with its UTC days, which are asked for by name."""
ALL_REFUSAL_GROUPS, ALL_CALIBRATION_GROUPS = ",".join(REFUSAL_GROUPS), ",".join(CALIBRATION_GROUPS)

Whole = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
CURSOR_TYPES: dict[str, Any] = {"start": Instant, "wait_bucket": Whole}
"""Of groups that are no text."""


class RefusalCountQuery(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename=RENAMED):
    """Which refusals to count, and by what."""

    window: str = "hour"
    group_by: str = ALL_REFUSAL_GROUPS
    """Words of `REFUSAL_GROUPS`, with commas between them; empty: by time alone."""
    tenant: str | None = None
    code: str | None = None
    limit_id: str | None = None
    since: str | None = None
    until: str | None = None


class CalibrationQuery(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename=RENAMED):
    """Which stated figures to compare with the actual ones, and by what."""

    group_by: str = ALL_CALIBRATION_GROUPS
    """Words of `BY_DAY`, with commas between them; empty: all together."""
    model: str | None = None
    tier: str | None = None
    figure: str | None = None
    kind: str | None = None
    since: str | None = None
    until: str | None = None


class CountReads(AdminActs):
    """Reads of counts. Each raises `Invalid`, `NotFound`, `DatabaseUnavailable`."""

    async def refusals(
        self, query: RefusalCountQuery, *, cursor: str | None = None, limit: int = 100
    ) -> Page[dict[str, Any]]:
        """Exact numbers of refusals, by time and groups, the oldest first."""
        window = one_of("window", query.window, WINDOWS_S)
        window_s, counts = WINDOWS_S[window], refusal_counts.c
        since_s, until_s = self._span(query, USUAL_S[window], LONGEST_S[window])
        # A literal: PostgreSQL takes two parameters of one value for two expressions.
        start = counts.minute_s - counts.minute_s % literal_column(str(window_s), Integer)
        groups: dict[str, ColumnElement[Any]] = {} if window == "total" else {"start": start}
        groups |= {name: counts[name] for name in _groups(query.group_by, REFUSAL_GROUPS)}

        def conditions(connection: Connection, last: Sequence[Any] | None) -> Conditions:
            first_s = last[0] if last and "start" in groups else since_s // window_s * window_s
            found: Conditions = [counts.minute_s >= first_s, counts.minute_s < until_s]
            if query.tenant is not None:
                tenant = text("tenant", query.tenant, MAX_NAME_CHARACTERS)
                found.append(counts.tenant_id == queries.find_tenant(connection, tenant).tenant_id)
            if query.code is not None:
                found.append(counts.code == text("code", query.code, MAX_CODE_CHARACTERS))
            if query.limit_id is not None:
                found.append(counts.limit_id == text("limit_id", query.limit_id, MAX_ID_CHARACTERS))
            return found

        sums = {"count": func.sum(counts["count"])}
        page = await self._grouped("refusal counts", query, groups, sums, conditions, cursor, limit)
        return _with_starts(page)

    async def calibration(
        self, query: CalibrationQuery, *, cursor: str | None = None, limit: int = 100
    ) -> Page[dict[str, Any]]:
        """How often figures stated on arrival were kept, by groups."""
        counts = calibration_counts.c
        since_s, until_s = self._span(query, USUAL_CALIBRATION_S, LONGEST_CALIBRATION_S)
        where: Conditions = [counts.hour_s >= since_s // 3600 * 3600, counts.hour_s < until_s]
        for name, value, known in (
            ("tier", query.tier, tuple(Tier)),
            ("figure", query.figure, FIGURES),
            ("kind", query.kind, KINDS),
        ):
            if value is not None:
                where.append(counts[name] == one_of(name, value, known))
        if query.model is not None:
            where.append(counts.model == text("model", query.model, MAX_MODEL_CHARACTERS))
        day = counts.hour_s - counts.hour_s % literal_column(str(DAY_S), Integer)
        names = _groups(query.group_by, BY_DAY)
        groups = {name: day if name == "start" else counts[name] for name in names}
        sums = {name: func.sum(counts[name]) for name in KeptCount._fields}
        page = await self._grouped("calibration", query, groups, sums, lambda *_: where, cursor, limit)
        return _with_starts(page)

    async def _grouped(
        self,
        name: str,
        query: msgspec.Struct,
        groups: Mapping[str, ColumnElement[Any]],
        sums: Mapping[str, ColumnElement[Any]],
        conditions: Callable[[Connection, Sequence[Any] | None], Conditions],
        cursor: str | None,
        limit: int,
    ) -> Page[dict[str, Any]]:
        """Sums by groups, in the order of the groups. `conditions` are made with the last row shown."""
        filters, most = msgspec.to_builtins(query), checked_limit(limit)
        types = tuple(CURSOR_TYPES.get(group, Text) for group in groups)
        last = None if cursor is None else decode_cursor(name, filters, cursor, tuple[types])  # type: ignore[valid-type]
        columns = list(groups.values())

        def read(connection: Connection) -> list[dict[str, Any]]:
            where = conditions(connection, last)
            if last:
                where = [*where, beyond(columns, last)]
            labelled = [column.label(label) for label, column in {**groups, **sums}.items()]
            query_ = select(*labelled).where(*where).group_by(*columns).order_by(*columns).limit(most + 1)
            rows = [dict(row) for row in connection.execute(query_).mappings()]
            # Without groups there is one row, also where nothing is added up.
            return [row | {name: int(row[name]) for name in sums} for row in rows if row[next(iter(sums))]]

        grouped = await self._transactions.read(read)
        return page_of(grouped, most, name, filters, lambda row: [row[group] for group in groups])

    def _span(
        self, query: RefusalCountQuery | CalibrationQuery, usual_s: int, longest_s: int
    ) -> tuple[int, int]:
        """The first second and the one after the last. Raises `Invalid`."""
        until_s = int(self._transactions.clock()) + 1
        if query.until is not None:
            until_s = -(-to_us(validation.instant("to", query.until)) // 1_000_000)
        since_s = until_s - usual_s
        if query.since is not None:
            since_s = to_us(validation.instant("from", query.since)) // 1_000_000
        if since_s >= until_s:
            raise Invalid("from", "must lie before 'to': as it is, nothing can match")
        if until_s - since_s > longest_s + 1:
            days = timedelta(seconds=longest_s).days
            raise Invalid("from", f"lies more than {days} days before 'to': ask for less at a time")
        return since_s, until_s


def _with_starts(page: Page[dict[str, Any]]) -> Page[dict[str, Any]]:
    """The page with its starts as instants, where it has some."""
    for row in page.rows:
        if "start" in row:
            row["start"] = from_us(row["start"] * 1_000_000).isoformat()
    return page


def _groups(group_by: str, known: Mapping[str, str]) -> list[str]:
    words = [word.strip() for word in group_by.split(",")] if group_by.strip() else []
    for word in words:
        one_of("group_by", word, known)
    return [column for word, column in known.items() if word in words]
