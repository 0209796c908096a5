"""Events of soft and shadow limits: detection and storage.

A soft limit records grants at and above its thresholds, a shadow limit those that it would have refused, by
window and level. One row each, to which all gateways add; only the newest windows of a limit are kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any

from sqlalchemy import Connection, RowMapping, case, delete, select

from tenants.directory import queries
from tenants.instants import from_us
from tenants.quota.store import Granted, LimitState
from tenants.storage.database import Database
from tenants.storage.tables import limit_events, limits
from tenants.storage.upserts import insert
from tenants.types import LimitMode

MAX_WINDOWS_KEPT = 100
"""Per limit, counting windows with events; with a window of a minute at least the last 100 minutes."""


class EventKind(StrEnum):
    THRESHOLD = "threshold"
    WOULD_DENY = "would_deny"


@dataclass(frozen=True, slots=True)
class EventKey:
    limit_id: str
    window_start_s: int
    """Seconds since 1970; 0 where the limit has no windows."""
    kind: EventKind
    level: int
    """Per cent of the amount; 0 for `would_deny`."""


@dataclass(frozen=True, slots=True)
class AlertTally:
    count: int
    first_us: int
    last_us: int

    def and_at(self, now_us: int) -> AlertTally:
        return self.with_newer(AlertTally(1, now_us, now_us))

    def with_newer(self, other: AlertTally) -> AlertTally:
        first_us, last_us = min(self.first_us, other.first_us), max(self.last_us, other.last_us)
        return AlertTally(self.count + other.count, first_us, last_us)


@dataclass(frozen=True, slots=True)
class LimitEvent:
    key: EventKey
    count: int
    first: datetime
    last: datetime

    def as_json(self) -> dict[str, Any]:
        start_s = self.key.window_start_s
        return {
            "window_start": from_us(start_s * 1_000_000).isoformat() if start_s else None,
            "kind": self.key.kind.value,
            "level": self.key.level,
            "count": self.count,
            "first": self.first.isoformat(),
            "last": self.last.isoformat(),
        }


def noticed(granted: Granted) -> list[EventKey]:
    """Each soft threshold reached by use and holds, each shadow limit that would have refused. Pure."""
    keys: list[EventKey] = []
    shadows = {limit.limit_id for limit in granted.would_deny}
    for state in granted.states:
        limit = state.limit
        if limit.mode is LimitMode.SOFT:
            taken = state.used + state.held
            keys += [
                EventKey(limit.limit_id, _window_start_s(state), EventKind.THRESHOLD, level)
                for level in limit.thresholds
                if taken * 100 >= level * limit.amount
            ]
        elif limit.limit_id in shadows:
            keys.append(EventKey(limit.limit_id, _window_start_s(state), EventKind.WOULD_DENY, 0))
    return keys


def _window_start_s(state: LimitState) -> int:
    # The counter's name ends in its window's start (`rules.counter_name`).
    return 0 if state.limit.window is None else int(state.counter.rpartition("@")[2])


async def add(database: Database, tallies: Mapping[EventKey, AlertTally]) -> None:
    """Skips deleted limits. Raises `DatabaseUnavailable`; whether the counts were added is then unknown, so a
    repeat may count twice."""
    await database.write(lambda connection: _add(connection, tallies))


def _add(connection: Connection, tallies: Mapping[EventKey, AlertTally]) -> None:
    wanted = sorted({key.limit_id for key in tallies})
    known = {
        limit_id
        for chunk in queries.chunks(wanted)
        for limit_id in connection.execute(select(limits.c.id).where(limits.c.id.in_(chunk))).scalars()
    }
    # The same order in every gateway, so that two of them never deadlock.
    for key in sorted(tallies, key=lambda key: (key.limit_id, key.window_start_s, key.kind, key.level)):
        if key.limit_id not in known:
            continue
        tally = tallies[key]
        new = insert(connection, limit_events).values(
            limit_id=key.limit_id,
            window_start_s=key.window_start_s,
            kind=key.kind.value,
            level=key.level,
            count=tally.count,
            first_us=tally.first_us,
            last_us=tally.last_us,
        )
        have, more = limit_events.c, new.excluded
        connection.execute(
            new.on_conflict_do_update(
                index_elements=["limit_id", "window_start_s", "kind", "level"],
                set_={
                    "count": have["count"] + more["count"],
                    "first_us": case((have.first_us < more.first_us, have.first_us), else_=more.first_us),
                    "last_us": case((have.last_us > more.last_us, have.last_us), else_=more.last_us),
                },
            )
        )
    for limit_id in known:
        _forget_old_windows(connection, limit_id)


def _forget_old_windows(connection: Connection, limit_id: str) -> None:
    starts = select(limit_events.c.window_start_s).where(limit_events.c.limit_id == limit_id).distinct()
    oldest_kept = connection.execute(
        starts.order_by(limit_events.c.window_start_s.desc()).offset(MAX_WINDOWS_KEPT - 1).limit(1)
    ).scalar()
    if oldest_kept is not None:
        connection.execute(
            delete(limit_events).where(
                limit_events.c.limit_id == limit_id, limit_events.c.window_start_s < oldest_kept
            )
        )


def events_of(connection: Connection, limit_ids: list[str]) -> dict[str, list[LimitEvent]]:
    """By limit, newest window first, then by level."""
    by_limit: dict[str, list[LimitEvent]] = {}
    table = limit_events
    for chunk in queries.chunks(limit_ids):
        query = select(table).where(table.c.limit_id.in_(chunk))
        order = (table.c.limit_id, table.c.window_start_s.desc(), table.c.kind, table.c.level)
        for row in connection.execute(query.order_by(*order)).mappings():
            by_limit.setdefault(row["limit_id"], []).append(_event(row))
    return by_limit


def forget(connection: Connection, limit_id: str) -> None:
    connection.execute(delete(limit_events).where(limit_events.c.limit_id == limit_id))


def _event(row: RowMapping) -> LimitEvent:
    key = EventKey(row["limit_id"], row["window_start_s"], EventKind(row["kind"]), row["level"])
    return LimitEvent(key, row["count"], from_us(row["first_us"]), from_us(row["last_us"]))
