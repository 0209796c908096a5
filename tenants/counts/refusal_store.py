"""Refused requests and their storage: some whole, all counted by minute, tenant, code and limit.

After two days the minutes of an hour are added up; hours are kept for 90 days. Each flush of a gateway counts
exactly once (`tenants/storage/flushes.py`). Purged by age and number; no account depends on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import Connection, delete, select
from sqlalchemy.sql import ColumnElement

from tenants.instants import from_us
from tenants.storage import flushes
from tenants.storage.database import Database
from tenants.storage.flushes import Flush
from tenants.storage.tables import refusal_counts, refusals
from tenants.storage.upserts import add_counts, insert

MAX_ID_CHARACTERS = 80
MAX_MODEL_CHARACTERS = 256
MAX_CODE_CHARACTERS = 64
DAY_S = 86_400
KEPT_ROWS_S = 30 * DAY_S
KEPT_COUNTS_S = 90 * DAY_S
KEPT_MINUTES_S = 2 * DAY_S
"""After that, minutes are added up to their hours."""
MAX_ADDED_UP = 120
MAX_ROWS = 2_000_000
MAX_PURGED = 20_000
"""Rows removed by one statement, so that it does not block other writes for long."""


class RefusalKey(NamedTuple):
    """What refused requests are counted by."""

    minute_s: int
    """Seconds since 1970."""
    tenant_id: str
    """Empty: the key is not known."""
    code: str
    limit_id: str
    """Empty: no limit refused it."""


Counts = dict[RefusalKey, int]


class RefusedRequest(msgspec.Struct, frozen=True):
    """One refused request. Empty texts: not known, or none."""

    request_id: str
    at_us: int
    """Microseconds since 1970."""
    code: str
    tenant_id: str = ""
    project_id: str = ""
    key_id: str = ""
    tier: str = ""
    model: str = ""
    """As it was asked for."""
    limit_id: str = ""
    of_platform: bool = False
    """The limit is on all tenants together."""
    wanted: int | None = None
    """In the limit's unit."""
    available: int | None = None
    retry_after_ms: int | None = None

    @property
    def key(self) -> RefusalKey:
        return RefusalKey(self.at_us // 60_000_000 * 60, self.tenant_id, self.code, self.limit_id)

    def as_json(self) -> dict[str, Any]:
        return {
            "request_id": self.request_id,
            "object": "refusal",
            "at": from_us(self.at_us).isoformat(),
            "tenant_id": self.tenant_id or None,
            "project_id": self.project_id or None,
            "key_id": self.key_id or None,
            "tier": self.tier or None,
            "model": self.model or None,
            "code": self.code,
            "limit_id": self.limit_id or None,
            "of_platform": self.of_platform,
            "wanted": self.wanted,
            "available": self.available,
            "retry_after_s": None if self.retry_after_ms is None else self.retry_after_ms / 1000,
        }

    def for_tenant(self) -> RefusedRequest:
        """As its tenant sees it: without the numbers of platform limits."""
        if not self.of_platform:
            return self
        return msgspec.structs.replace(self, limit_id="", wanted=None, available=None)


def added(counts: Counts, more: Mapping[RefusalKey, int]) -> None:
    for key, count in more.items():
        counts[key] = counts.get(key, 0) + count


def merged(counts: Counts, most: int) -> Counts:
    """The same refusals under at most `most` keys: minutes are given up first, then limits, then tenants,
    each only where needed. Codes are few and always stay."""
    first_s = min((key.minute_s for key in counts), default=0)
    coarser: tuple[Callable[[RefusalKey], RefusalKey], ...] = (
        lambda key: key._replace(minute_s=first_s),
        lambda key: key._replace(limit_id=""),
        lambda key: key._replace(tenant_id=""),
    )
    for coarse in coarser:
        if len(counts) <= most:
            break
        fewer: Counts = {}
        for key, count in counts.items():
            added(fewer, {coarse(key): count})
        counts = fewer
    return counts


async def add(
    database: Database,
    counts: Mapping[RefusalKey, int],
    rows: Sequence[RefusedRequest],
    flush: Flush,
    now_s: float,
) -> None:
    """Adds the counts and rows, unless this flush was added before. Raises `DatabaseUnavailable`."""

    def work(connection: Connection) -> None:
        if flushes.is_new(connection, flush, round(now_s * 1e6)):
            _add(connection, counts, rows)

    await database.write(work)


def _add(connection: Connection, counts: Mapping[RefusalKey, int], rows: Sequence[RefusedRequest]) -> None:
    _add_counts(connection, counts)
    if rows:
        connection.execute(
            insert(connection, refusals).on_conflict_do_nothing(),
            [msgspec.structs.asdict(row) for row in rows],
        )


def _add_counts(connection: Connection, counts: Mapping[RefusalKey, int]) -> None:
    add_counts(
        connection, refusal_counts, [key._asdict() | {"count": count} for key, count in counts.items()]
    )


def find(connection: Connection, request_id: str) -> RefusedRequest | None:
    """None: not refused, not kept whole, or purged."""
    rows = where(connection, [refusals.c.request_id == request_id], 1)
    return rows[0] if rows else None


def where(
    connection: Connection, conditions: Sequence[ColumnElement[bool]], most: int
) -> list[RefusedRequest]:
    columns = [refusals.c[name] for name in RefusedRequest.__struct_fields__]
    order = (refusals.c.at_us.desc(), refusals.c.request_id.desc())
    query = select(*columns).where(*conditions).order_by(*order).limit(most)
    return [RefusedRequest(*row) for row in connection.execute(query)]


async def purge(database: Database, now_s: float, most_rows: int = MAX_ROWS) -> int:
    """Deletes up to `MAX_PURGED` of each kind, old or beyond `most_rows`. Raises `DatabaseUnavailable`."""

    def work(connection: Connection) -> int:
        flushes.purge(connection, round(now_s * 1e6))
        before_us = round((now_s - KEPT_ROWS_S) * 1e6)
        too_many = connection.execute(
            select(refusals.c.at_us).order_by(refusals.c.at_us.desc()).offset(most_rows).limit(1)
        ).scalar()
        if too_many is not None:
            before_us = max(before_us, too_many + 1)
        oldest = select(refusals.c.request_id).where(refusals.c.at_us < before_us)
        oldest = oldest.order_by(refusals.c.at_us).limit(MAX_PURGED)
        gone = connection.execute(delete(refusals).where(refusals.c.request_id.in_(oldest))).rowcount
        return gone + _purge_counts(connection, int(now_s) - KEPT_COUNTS_S)

    for _ in range(MAX_ADDED_UP):
        if not await database.write(lambda connection: _add_up(connection, int(now_s) - KEPT_MINUTES_S)):
            break
    return await database.write(work)


def _add_up(connection: Connection, before_s: int) -> bool:
    """Adds the oldest minute before `before_s` to its hour; False: none is left. Two gateways may do so at
    once: what one of them deletes the other does not see."""
    minute_s: Any = refusal_counts.c.minute_s
    of_day = [minute_s >= before_s - DAY_S, minute_s < before_s, minute_s % 3600 != 0]
    oldest_s = connection.execute(select(minute_s).where(*of_day).order_by(minute_s).limit(1)).scalar()
    if oldest_s is None:
        return False
    columns = [refusal_counts.c[name] for name in RefusalKey._fields]
    gone = delete(refusal_counts).where(minute_s == oldest_s).returning(*columns, refusal_counts.c["count"])
    counts: dict[RefusalKey, int] = {}
    for *key, count in connection.execute(gone):
        counts[RefusalKey(*key)._replace(minute_s=oldest_s // 3600 * 3600)] = count
    _add_counts(connection, counts)
    return True


def _purge_counts(connection: Connection, before_s: int) -> int:
    """Deletes whole minutes with at most `MAX_PURGED` counts together, and one at least."""
    minute_s: Any = refusal_counts.c.minute_s
    oldest = select(minute_s).where(minute_s < before_s).order_by(minute_s).limit(MAX_PURGED)
    minutes = connection.execute(oldest).scalars().all()
    if not minutes:
        return 0
    return connection.execute(delete(refusal_counts).where(minute_s <= minutes[-1])).rowcount
