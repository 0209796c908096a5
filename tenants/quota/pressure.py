"""How close limits are to refusing, and how many requests they have refused.

A window is *exhausted* if it has no room for a typical request: if less is left than the mean request of its
tenant used since yesterday (UTC), or if more than half is used and the smallest request that it refused in
the last ten minutes would not fit now either. It is *nearly* used up from 80 % on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from sqlalchemy import BigInteger, Connection, cast, func, select

from tenants.quota.rules import is_platforms, window_bounds_us
from tenants.quota.store import LimitState
from tenants.storage.tables import refusal_counts, refusals
from tenants.types import PLATFORM, Limit, LimitMode, Meter
from tenants.usage.query import UsageQuery
from tenants.usage.read import usage
from tenants.usage.sums import AMOUNTS, COUNTED_AS, DAY_US

NEARLY = 0.8
"""Of a limit, used or held."""
LEAST_USED = 0.5
"""Of a limit, before its refusals count as a sign: a request may be larger than all others."""
LATELY_US = 10 * 60 * 1_000_000
MOST_TENANTS = 10_000
MOST_DATED = 100
"""Exhausted limits whose first refusal is looked up."""


class Level(StrEnum):
    FREE = "free"
    NEARLY = "nearly"
    EXHAUSTED = "exhausted"


@dataclass(frozen=True, slots=True)
class Traffic:
    """Recent requests, by which limits are judged."""

    mean: Mapping[str, Mapping[Meter, float]] = field(default_factory=dict)
    """What a request used, by tenant and meter; of `PLATFORM`: of all tenants."""
    refused: Mapping[str, int] = field(default_factory=dict)
    """Requests refused since midnight (UTC), by limit id."""
    smallest: Mapping[str, int] = field(default_factory=dict)
    """The least that a request refused in the last ten minutes wanted, by limit id."""


@dataclass(frozen=True, slots=True)
class LimitPressure:
    state: LimitState
    level: Level
    refused: int
    """Requests that it refused today, since midnight (UTC)."""
    since_us: int | None = None
    """When it first refused for want of room in this window; None: not exhausted, or it has not yet."""

    @property
    def limit(self) -> Limit:
        return self.state.limit

    @property
    def taken(self) -> float:
        """Part of the limit that is used or held."""
        return (self.state.used + self.state.held) / max(1, self.limit.amount)


def may_exhaust(limit: Limit) -> bool:
    """Whether the limit is a hard window with a counter: rates refill, and running requests end."""
    return limit.mode is LimitMode.HARD and limit.window is not None and not limit.is_default


def typical(limit: Limit, traffic: Traffic) -> int:
    """What a request takes of the limit, at least 1."""
    owner = PLATFORM if is_platforms(limit) else limit.tenant_id
    return max(1, round(traffic.mean.get(owner, {}).get(limit.meter, 1)))


def level_of(state: LimitState, traffic: Traffic) -> Level:
    limit, taken = state.limit, state.used + state.held
    if limit.amount - state.used < typical(limit, traffic):
        return Level.EXHAUSTED
    smallest = traffic.smallest.get(limit.limit_id)
    if smallest is not None and taken > LEAST_USED * limit.amount and state.available < smallest:
        return Level.EXHAUSTED
    return Level.NEARLY if taken >= NEARLY * limit.amount else Level.FREE


def read(
    connection: Connection, states: Iterable[LimitState], now_us: int, tenant_id: str | None = None
) -> list[LimitPressure]:
    """Those that may be exhausted, the closest to refusing first. `tenant_id`: that all of them are of."""
    judged = [state for state in states if may_exhaust(state.limit)]
    traffic = traffic_of(connection, now_us, [state.limit.limit_id for state in judged], tenant_id)
    found: list[LimitPressure] = []
    for state in judged:
        level, since_us = level_of(state, traffic), None
        if level is Level.EXHAUSTED and len(found) < MOST_DATED:
            since_us = _refuses_since(connection, state, typical(state.limit, traffic), now_us)
        refused = traffic.refused.get(state.limit.limit_id, 0)
        found.append(LimitPressure(state, level, refused, since_us))
    return sorted(found, key=lambda one: (one.level is not Level.EXHAUSTED, -one.refused, -one.taken))


def traffic_of(
    connection: Connection, now_us: int, limit_ids: Sequence[str], tenant_id: str | None = None
) -> Traffic:
    """Of all tenants, or one, and these limits. Three queries."""
    today_us = day_start_us(now_us)
    asked = UsageQuery(today_us - DAY_US, today_us + DAY_US, group_by=("tenant",), tenant_id=tenant_id)
    sums = {row.key[1]: row.amounts for row in usage(connection, asked, None, MOST_TENANTS).rows}
    if tenant_id is None:
        sums[PLATFORM] = tuple(map(sum, zip(*sums.values(), strict=True))) if sums else ()
    counts, rows = refusal_counts.c, refusals.c
    count = cast(func.sum(counts["count"]), BigInteger)
    refused = select(counts.limit_id, count).where(counts.minute_s >= today_us // 1_000_000)
    lately = select(rows.limit_id, func.min(rows.wanted)).where(rows.limit_id.in_(limit_ids))
    lately = lately.where(rows.at_us > now_us - LATELY_US, rows.wanted.is_not(None)).group_by(rows.limit_id)
    if tenant_id is not None:
        refused = refused.where(counts.tenant_id == tenant_id)
    refused = refused.where(counts.limit_id != "").group_by(counts.limit_id)
    return Traffic(
        {owner: _means(amounts) for owner, amounts in sums.items() if amounts},
        _by_limit(connection, refused),
        _by_limit(connection, lately),
    )


def day_start_us(now_us: int) -> int:
    """Midnight (UTC)."""
    return now_us // DAY_US * DAY_US


def _means(amounts: Sequence[int]) -> dict[Meter, float]:
    sums = dict(zip(AMOUNTS, amounts, strict=True))
    requests = max(1, sums["requests"])
    return {meter: sum(sums[name] for name in names) / requests for meter, names in COUNTED_AS.items()}


def _by_limit(connection: Connection, query: Any) -> dict[str, int]:
    return {limit_id: int(value) for limit_id, value in connection.execute(query)}


def _refuses_since(connection: Connection, state: LimitState, least: int, now_us: int) -> int | None:
    """The first refusal of the window when less was left than `least`, or than now."""
    limit, columns = state.limit, refusals.c
    assert limit.window is not None
    start_us, _ = window_bounds_us(limit.window, limit.time_zone, now_us)
    query = select(func.min(columns.at_us)).where(
        columns.limit_id == limit.limit_id,
        columns.at_us >= start_us,
        columns.available <= max(least - 1, state.available),
    )
    return connection.execute(query).scalar()
